"""Bad input gets one clear error, before anything runs."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

from moetor import Activation, ExpertsInterface, MoetorError, experts_forward
from moetor.core.interface import describe_call
from moetor.testing import Case, make_inputs
from moetor.testing.cases import EVERYTHING

T, K, H = 4, 2, 64


def call(**changes: object) -> torch.Tensor:
    inputs = make_inputs(Case(tokens=T, top_k=K, hidden=H))
    arguments = {
        "weights": inputs.weights,
        "hidden_states": inputs.hidden_states,
        "top_k_index": inputs.top_k_index,
        "top_k_weights": inputs.top_k_weights,
    }
    return experts_forward(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": torch.zeros(2, 2, H)}, r"hidden_states must have shape \(T, H\), got \(2, 2, 64\)"),
        ({"hidden_states": torch.zeros(T, H + 1)}, "must have H = 64 columns, as the weights do, got 65"),
        ({"hidden_states": torch.zeros(T + 1, H)}, r"must both have shape \(T, K\) with T = 5"),
        (
            {"hidden_states": torch.zeros(T, H).half()},
            "must have the dtype of the weights, torch.float32, got torch.float16",
        ),
        ({"top_k_index": torch.zeros(T, dtype=torch.int64)}, r"top_k_index must have shape \(T, K\), got \(4,\)"),
        ({"top_k_index": torch.zeros(T, K)}, "top_k_index must be int64 or int32, got torch.float32"),
        ({"top_k_index": torch.zeros(T, K, dtype=torch.uint8)}, "top_k_index must be int64 or int32, got torch.uint8"),
        ({"top_k_weights": torch.zeros(T, K + 1)}, r"got \(4, 2\) and \(4, 3\)"),
        ({"top_k_weights": torch.zeros(T, K, dtype=torch.int64)}, "top_k_weights must be of a float dtype"),
        (
            {"top_k_index": torch.zeros(T, 0, dtype=torch.int64), "top_k_weights": torch.zeros(T, 0)},
            "at least one expert a token",
        ),
        ({"hidden_states": torch.zeros(T, H, dtype=torch.int64)}, "hidden_states must be of a float dtype"),
        ({"backend": ["eager"]}, "unknown experts backend"),
        ({"hidden_states": torch.zeros(T, H, device="meta")}, "on one device, got .'cpu', 'meta'."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_one_clear_error(changes: dict, message: str) -> None:
    with pytest.raises(MoetorError, match=message):
        call(**changes)


def test_result_has_the_dtype_of_hidden_states() -> None:
    assert call().dtype == torch.float32


@pytest.mark.parametrize("backend", ["eager", "grouped_mm", "batched_mm"])
def test_fp16_output_larger_than_fp16_is_finite_after_a_small_weight(backend: str) -> None:
    """300 · 300 · 1 = 90000 overflows fp16; times 0.01 it does not."""
    from moetor import Activation, ExpertWeights, Weight

    half = {"dtype": torch.float16}
    weights = ExpertWeights(
        Weight(torch.full((1, 1, 1), 300.0, **half)),
        Weight(torch.full((1, 1, 1), 300.0, **half)),
        activation=Activation("identity"),
        gated=False,
    )
    result = experts_forward(
        weights, torch.ones(1, 1, **half), torch.tensor([[0]]), torch.full((1, 1), 0.01), backend=backend
    )
    assert result.item() == 900.0


def test_override_wins_over_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    from moetor import ExpertsInterface, forward

    ExpertsInterface.register("seen", lambda w, x, i, r: seen.append(1) or x)
    try:
        monkeypatch.setattr(forward, "OVERRIDE", "seen")
        call(backend="grouped_mm")
    finally:
        ExpertsInterface.unregister("seen")
    assert seen


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm"])
def test_meta_tensors_give_the_shape(backend: str) -> None:
    inputs = make_inputs(Case(tokens=T, top_k=K, hidden=H), "meta")
    result = experts_forward(
        inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
    )
    assert result.shape == (T, H)
    assert result.is_meta


@pytest.mark.parametrize("backend", ["eager", "grouped_mm", "batched_mm", "fused"])
def test_forward_mode_derivative_is_right_or_refused(backend: str) -> None:
    inputs = make_inputs(Case(tokens=T, dtype=torch.float64, frozen=EVERYTHING))
    rest = (inputs.top_k_index, inputs.top_k_weights, "eager")
    direction = torch.randn_like(inputs.hidden_states)
    step = 1e-6 * direction
    ahead, behind = (experts_forward(inputs.weights, inputs.hidden_states + s, *rest) for s in (step, -step))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs.hidden_states, direction)
        try:
            result = experts_forward(inputs.weights, dual, inputs.top_k_index, inputs.top_k_weights, backend)
        except (MoetorError, NotImplementedError, RuntimeError):
            return
        tangent = forward_ad.unpack_dual(result).tangent
        assert tangent is not None
        torch.testing.assert_close(tangent, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-6)


def test_own_functions_run_inside_autocast() -> None:
    inputs = make_inputs(Case(gate="custom", norm=True))
    gate = torch.nn.Linear(64, 32)
    norm = torch.nn.LayerNorm(64)
    weights = replace(inputs.weights, activation=Activation.custom(gate), after_down=norm)
    for backend in ("eager", "grouped_mm", "batched_mm"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = experts_forward(
                weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
            )
        assert result.dtype == torch.float32
        result.sum().backward()


def test_fused_refuses_a_pair_of_biases_stored_apart() -> None:
    """Both are read with the strides of the first."""
    inputs = make_inputs(Case(layout="pair", bias=True, frozen=EVERYTHING))
    gate, up = inputs.weights.ups
    room = torch.zeros(5, 64)
    apart = replace(inputs.weights, up=(gate, replace(up, bias=room[:, 32:])))
    call = describe_call(apart, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    on_gpu = replace(call, device=torch.device("cuda"))
    assert "stored alike" in (ExpertsInterface["fused"].why_not(apart, on_gpu) or "")
    assert ExpertsInterface["fused"].why_not(inputs.weights, on_gpu) is None
