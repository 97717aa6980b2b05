"""Bad input gets one clear error, before anything runs."""

import pytest
import torch

from moetor import InvalidInput, experts_forward
from moetor.testing import Case, make_inputs

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
        ({"hidden_states": torch.zeros(T, H, device="meta")}, "on one device, got .'cpu', 'meta'."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_one_clear_error(changes: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
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
