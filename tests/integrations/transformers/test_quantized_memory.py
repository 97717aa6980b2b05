"""Peak memory of a quantised load: below what the model takes in the end, and two layers as the files have them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from moetor.quantization import FineGrainedFP8Config

from . import quantized_checkpoints as checkpoints

if not Path("/proc/self/status").exists():
    pytest.skip("memory is read from /proc, which this system has not", allow_module_level=True)

LAYERS, HIDDEN, INTER, EXPERTS = 4, 256, 1024, 8
LAYER = 3 * EXPERTS * HIDDEN * INTER  # numbers; 12 MiB in bfloat16

# Name: which files, `quantization_config`, bytes that a number takes in them.
LOADS = {
    "fp8 on the fly": ("dense", "Config()", 2),
    "fp4 on the fly": ("dense", "Config(expert_dtype='fp4', activation_scheme=None)", 2),
    "fp8": ("quantized", "None", 1),
    "dequantized": ("quantized", "Config(dequantize=True)", 1),
}

# What files are mapped to is the system's to drop, so only memory of the process' own counts.
SCRIPT = """
import sys, threading, torch, moetor

def own_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def load(folder, asked):
    config = eval(asked, {"Config": moetor.FineGrainedFP8Config})
    return moetor.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

def peak_and_final(folder, asked):
    before, peak, done = own_bytes(), [0], threading.Event()
    def watch():
        while not done.wait(0.0005):
            peak[0] = max(peak[0], own_bytes())
    thread = threading.Thread(target=watch)
    thread.start()
    model = load(folder, asked)
    done.set()
    thread.join()
    print(peak[0] - before, sum(p.nbytes for p in model.parameters()))

loads = [argument.split("|") for argument in sys.argv[1:]]
for large, small, asked in loads:  # imports, and what is made once
    load(small, asked)
for large, small, asked in loads:
    peak_and_final(large, asked)
"""


def config(layers: int, hidden: int = HIDDEN, inter: int = INTER) -> transformers.PreTrainedConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    sizes = {"hidden_size": hidden, "intermediate_size": inter, "num_local_experts": EXPERTS, "vocab_size": 64}
    return transformers.MixtralConfig(**sizes, **heads, num_hidden_layers=layers)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """ "dense" and "quantized", each with a small one beside it to warm up with."""
    torch.manual_seed(0)
    found = {}
    for name, made in (("large", config(LAYERS)), ("small", config(1, 128, 128))):
        folder = tmp_path_factory.mktemp(name)
        found[f"quantized {name}"] = checkpoints.write(folder, made, FineGrainedFP8Config()).folder
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        model.save_pretrained(folder / "dense")
        found[f"dense {name}"] = folder / "dense"
    return found


@pytest.fixture(scope="module")
def measured(folders) -> dict[str, tuple[int, int]]:
    """Peak and final bytes of each load."""
    arguments = [
        f"{folders[f'{files} large']}|{folders[f'{files} small']}|{asked}" for files, asked, _ in LOADS.values()
    ]
    # large blocks straight from the system, and back to it: what is freed is not counted
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    numbers = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()[-len(LOADS) :]]
    return dict(zip(LOADS, numbers, strict=True))


@pytest.mark.parametrize("name", LOADS)
def test_peak_is_the_model_and_two_layers_at_most(measured, name) -> None:
    peak, final = measured[name]
    layer = LOADS[name][2] * LAYER
    print(f"peak {peak / 2**20:.1f} MiB, final {final / 2**20:.1f} MiB, a layer {layer / 2**20:.1f} MiB")
    assert final < peak + 2**20  # or nothing was seen
    assert peak < final + 2 * layer
