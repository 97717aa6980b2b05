"""`deepgemm` and `deepgemm_megamoe` by a stand-in of their library, and what they refuse."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moetor.backends.deepgemm as deepgemm
import moetor.backends.deepgemm_megamoe as megamoe
from moetor import BackendRefused, BackendUnavailable, ExpertsInterface, ExpertWeights, InvalidInput, experts_forward
from moetor.backends import external
from moetor.core.interface import describe_call
from moetor.core.weights import Prepared
from moetor.kernels.external.machine import Machine
from moetor.testing import Case, make_inputs
from moetor.testing.cases import EVERYTHING

ROOT = Path(__file__).parents[2]
BF16 = Case(dtype=torch.bfloat16, intermediate=64, frozen=EVERYTHING)
FP8 = replace(BF16, format="fp8", hidden=512, intermediate=256)
EXTERNAL = ("deepgemm", "deepgemm_megamoe", "sonicmoe")


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs the package triton")
def test_interpreted_kernels_and_stand_in_keep_the_contract() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_deepgemm.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    print(done.stdout)
    assert done.stdout.count("passed") == 4


def refusal(backend, case: Case, weights: ExpertWeights | None = None, **changes) -> str | None:
    inputs = make_inputs(case)
    weights = inputs.weights if weights is None else weights
    call = describe_call(weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    return backend.why_not(weights, replace(call, device=torch.device("cuda"), **changes))


@pytest.mark.parametrize("name", EXTERNAL)
def test_cpu_is_the_first_unmet_requirement(name: str) -> None:
    inputs = make_inputs(BF16)
    with pytest.raises(BackendUnavailable, match=f"'{name}' cannot run on cpu: needs an NVIDIA GPU, got cpu"):
        experts_forward(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, name)
    with pytest.raises(ImportError, match="needs an NVIDIA GPU, got cpu"):
        ExpertsInterface.load(name, "cpu")
    with pytest.raises(ImportError, match="needs an NVIDIA GPU, got cpu"):
        ExpertsInterface.prepare(make_inputs(FP8).weights, name)
    assert "needs CUDA tensors, got cpu" in (
        ExpertsInterface[name].why_not(inputs.weights, describe_call(inputs.weights, *call_of(inputs))) or ""
    )


def call_of(inputs):
    return inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights


REFUSED = [
    ({"frozen": frozenset()}, "has no backward pass; run inside torch.no_grad() or choose grouped_mm"),
    ({"dtype": torch.float32}, "needs bfloat16, got torch.float32"),
    ({"layout": "pair"}, "needs gate and up in one tensor, got two"),
    ({"layout": "strided"}, "needs the experts' matrices one after another without gaps, got other strides"),
    ({"layout": "unaligned"}, "needs matrices that begin at a multiple of 16 bytes, got others"),
    ({"gate": "custom"}, "cannot fuse a model's own gate function"),
    ({"norm": True}, "cannot fuse a norm after the second product"),
    (
        {"intermediate": 40},
        "needs torch.bfloat16 matrices of multiples of 64 rows and columns, got 80 × 64",
    ),
    (
        {"format": "fp8", "hidden": 192},
        "needs torch.float8_e4m3fn matrices of multiples of 128 rows and columns, got 128 × 192",
    ),
    ({"format": "fp8_tensor"}, "needs one scale a block of 128 × 128, got fp8_tensor"),
    (
        {"format": "fp8_tensor_static"},
        "rounds activations by scales of its own and cannot use static ones, got fp8_tensor_static",
    ),
    ({"format": "fp8_weights"}, "rounds activations to FP8, which weights of fp8_weights do not ask for"),
    ({"format": "mxfp4_dynamic"}, "multiplies FP4 weights on compute capability 10.0 only, got mxfp4_dynamic"),
    (
        {"format": "fp8_e8m0", "hidden": 256, "intermediate": 128},
        "reads such scales in float32; ExpertsInterface.prepare(weights, 'deepgemm') has them beside, exactly",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=str)
def test_what_deepgemm_cannot_honour_is_refused(changes: dict, reason: str) -> None:
    assert refusal(deepgemm, replace(BF16, **changes)) == reason


MEGA_REFUSED = [
    ({"format": "dense"}, "needs FP8 weights in blocks of 128 × 128, got dense"),
    ({"bias": True}, "cannot add biases"),
    ({"layout": "interleaved"}, "needs gate and up in one tensor, gate rows first"),
    ({"gated": False}, "needs experts with a gate, got none"),
    ({"hidden": 256}, "needs H a multiple of 512 and I of 256, at most 4096, got H = 256 and I = 256"),
    ({"intermediate": 1408}, "needs H a multiple of 512 and I of 256, at most 4096, got H = 512 and I = 1408"),
    ({"norm": True}, "cannot fuse a norm after the second product"),
    ({}, "needs weights laid out for it; ExpertsInterface.prepare(weights, 'deepgemm_megamoe') makes a copy that is"),
]


@pytest.mark.parametrize(("changes", "reason"), MEGA_REFUSED, ids=str)
def test_what_megamoe_cannot_honour_is_refused(changes: dict, reason: str) -> None:
    assert refusal(megamoe, replace(FP8, **changes)) == reason


@pytest.mark.parametrize("gate", ["gelu", "relu2", "quick_gelu", "gpt_oss", "limit_after", "softcap"])
def test_megamoe_takes_silu_and_a_limit_and_nothing_else(gate: str) -> None:
    assert (refusal(megamoe, replace(FP8, gate=gate)) or "").startswith("computes silu with a limit or without, got")
    assert "laid out" in (refusal(megamoe, replace(FP8, gate="limit")) or "")


@pytest.mark.parametrize("backend", [deepgemm, megamoe], ids=["deepgemm", "deepgemm_megamoe"])
def test_float32_scales_on_sm100_name_the_format_and_who_takes_them(backend, monkeypatch) -> None:
    monkeypatch.setattr(external, "machine_of", lambda device: Machine("cuda", capability=(10, 0)))
    monkeypatch.setattr(external, "major", lambda weights: 10)
    assert refusal(backend, FP8) == (
        'needs scales of powers of two on compute capability 10.0, got fp8; quantise with scale_fmt="ue8m0",'
        " or choose grouped_mm or batched_mm"
    )
    assert issubclass(BackendRefused, ValueError)


def test_copies_for_one_backend_are_nobody_elses_and_end_with_a_conversion() -> None:
    weights = make_inputs(replace(FP8, format="fp8_e8m0")).weights
    prepared = deepgemm.prepare(weights)
    assert prepared.prepared is not None
    assert refusal(deepgemm, FP8, prepared) is None
    assert torch.equal(prepared.prepared.up[0], weights.ups[0].scale.float())
    assert "laid out" in (refusal(megamoe, FP8, prepared) or "")
    other = replace(weights, prepared=Prepared("deepgemm_megamoe", (), ()))
    assert "in float32" in (refusal(deepgemm, FP8, other) or "")
    assert prepared.map(lambda tensor: tensor).prepared is None
    plain = make_inputs(FP8).weights
    assert deepgemm.prepare(plain) is plain
    with pytest.raises(BackendRefused, match="cannot prepare these weights: needs one scale a block"):
        deepgemm.prepare(make_inputs(replace(FP8, format="fp8_tensor")).weights)


def test_only_frozen_quantised_weights_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere = replace(deepgemm.BACKEND, name="anywhere", machine_why_not=lambda device: None)
    ExpertsInterface.register("anywhere", anywhere)
    try:
        with pytest.raises(InvalidInput, match="needs quantised weights, which are frozen, got dense"):
            ExpertsInterface.prepare(make_inputs(BF16).weights, "anywhere")
        weights = make_inputs(FP8).weights
        weights.down.scale.requires_grad_()
        with pytest.raises(InvalidInput, match="needs frozen weights, got some that require a gradient"):
            ExpertsInterface.prepare(weights, "anywhere")
    finally:
        ExpertsInterface.unregister("anywhere")
