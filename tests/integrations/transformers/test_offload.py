"""accelerate's offload: weights that live on the CPU or on disk between calls, in attached and in plain models."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import moetor

from .backends import ON_CPU
from .compare import relative_error
from .models import build, logits, tokens
from .phases import Criterion

accelerate = pytest.importorskip("accelerate")

# older releases of transformers take the first parameter's device for the model's
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`:UserWarning")

CPU = torch.device("cpu")
# what accelerate makes of a machine whose GPU holds one layer: the other one's weights are read for each call
HALF_ON_DISK = {
    **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"), "cpu"),
    "model.layers.1": "disk",
}
DEVICE_MAPS = {"auto": "auto", "half on disk": HALF_ON_DISK, "all on disk": {"": "disk"}}
WAYS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, execution_device=CPU),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, str(folder), execution_device=CPU),
    "dispatch_model": lambda model, folder: accelerate.dispatch_model(
        model, HALF_ON_DISK, main_device="cpu", offload_dir=str(folder), force_hooks=True
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, one a name."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("qwen3_moe", "gpt_oss"):
        build(name).save_pretrained(root / name)
    return root


def offloaded(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.model.layers[1].mlp.experts.parameters())


@pytest.mark.parametrize("library", [moetor, transformers], ids=["moetor", "plain"])
@pytest.mark.parametrize("device_map", DEVICE_MAPS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_device_map_gives_the_same_logits(name, device_map, library, folder, tmp_path, ran):
    choice = {moetor: "batched_mm", transformers: "moetor:batched_mm"}[library]
    options = {"max_memory": {"cpu": "60KB"}} if device_map == "auto" else {}  # "auto" fills what it is given
    model = library.AutoModelForCausalLM.from_pretrained(
        folder / name,
        device_map=DEVICE_MAPS[device_map],
        offload_folder=tmp_path,
        experts_implementation=choice,
        **options,
    )
    assert offloaded(model)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / name, experts_implementation="eager")
    with torch.no_grad():
        assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5
    assert ran.names() == ["batched_mm"]
    generation = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(tokens(), **generation), plain.generate(tokens(), **generation))
    assert offloaded(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_offload_after_attaching_and_before(backend, way, tmp_path):
    plain = build("gpt_oss")
    with torch.no_grad():
        expected = logits(plain, tokens())
    for attach_first in (True, False):
        model = copy.deepcopy(plain)
        if attach_first:
            moetor.attach(model, backend)
        model = WAYS[way](model, tmp_path / str(attach_first))
        if not attach_first:
            moetor.attach(model, backend)
        assert offloaded(model)
        with torch.no_grad():
            assert relative_error(logits(model, tokens()), expected) <= 1e-5


@torch.no_grad()
def test_choice_is_followed_while_offloaded(zeros):
    model = accelerate.cpu_offload(moetor.attach(build("qwen3_moe"), "eager"), execution_device=CPU)
    expected = logits(model, tokens())
    model.set_experts_implementation(zeros)
    assert relative_error(logits(model, tokens()), expected) > 1e-2
    model.set_experts_implementation("grouped_mm")
    assert relative_error(logits(model, tokens()), expected) <= 1e-5


def test_explanation_is_of_the_device_that_calls_run_on():
    model = moetor.attach(build("qwen3_moe"), "grouped_mm")
    before = model.explain_experts().parts[0]
    accelerate.cpu_offload(model, execution_device=CPU)
    part = model.explain_experts().parts[0]
    assert part.about == before.about.replace("on cpu", "on cpu, offloaded")
    assert part.by_tokens == before.by_tokens


def test_decode_phase_is_that_of_the_device_that_calls_run_on(monkeypatch, ran):
    switches = "moetor.integrations.transformers.decode.switches_on"
    monkeypatch.setattr(switches, lambda device: device.type == "cpu")
    model = accelerate.cpu_offload(moetor.attach(build("qwen3_moe"), "grouped_mm"), execution_device=CPU)
    criterion = Criterion(lambda: model.get_experts_implementation()[""])
    model.generate(tokens(), max_new_tokens=3, do_sample=False, stopping_criteria=[criterion])
    assert ran.names() == ["grouped_mm", "batched_mm"]
    assert set(criterion.seen) == {"batched_mm"}
    assert model.explain_experts().parts[0].decode.startswith("batched_mm up to")
