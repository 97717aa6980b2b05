"""What is declared about weights must agree with what they are."""

import pytest
import torch

from moetor import Activation, ExpertWeights, InvalidInput, Weight
from moetor.core.cost import bytes_per_expert, cost, experts_hit

E, H, I = 3, 8, 6


def stack(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Weight(stack(4, 4)), r"must have shape \(E, out, in\)"),
        (lambda: Weight([]), "one .out, in. matrix an expert"),
        (lambda: Weight((stack(4, 4),)), "one .out, in. matrix an expert"),
        (lambda: Weight([stack(4, 4), stack(4, 5)]), "must agree in shape, dtype and device"),
        (lambda: Weight([stack(4, 4)] * E, bias=[stack(4)] * (E - 1)), "biases must have shape"),
        (lambda: Weight([stack(4, 4)] * E, bias=[stack(1)] * E), "biases must have shape"),
        (lambda: Weight(stack(0, 4, 4)), r"must have shape \(E, out, in\)"),
        (lambda: Weight(stack(E, 4, 4), scale=stack(E, 1, 1)), "have no scale"),
        (lambda: Weight(stack(E, 4, 4).to(torch.float8_e4m3fn)), "float dtype of 16 bits or more"),
        (lambda: Weight(stack(E, 4, 4).long()), "float dtype of 16 bits or more"),
        (
            lambda: ExpertWeights((Weight(stack(E, I + 2, H)), Weight(stack(E, I - 2, H))), Weight(stack(E, H, I))),
            "two of I rows each",
        ),
        (
            lambda: ExpertWeights(Weight(stack(E, I, H)), Weight(stack(E, H, I)), gated=False, interleaved=True),
            "experts without a gate cannot",
        ),
        (
            lambda: ExpertWeights(
                Weight(stack(E, I, H)), Weight(stack(E, H, I)), activation=Activation(up_offset=1.0), gated=False
            ),
            "experts without a gate cannot",
        ),
        (
            lambda: ExpertWeights(Weight(stack(E, 2 * I, H)), Weight(stack(E, H, I)), activation="gelu"),
            "must be a moetor.Activation",
        ),
        (
            lambda: ExpertWeights(Weight(stack(E, 2 * I, H)), Weight(stack(E, H, I), bias=stack(E, H).to("meta"))),
            "biases must be floats on cpu",
        ),
        (
            lambda: Weight(stack(E, 4, 4), bias=stack(E, 5)),
            r"biases must have shape \(E, out\) = \(3, 4\), .* got \(3, 5\)",
        ),
        (lambda: Weight(stack(E, 4, 4), format="fp9"), "unknown format 'fp9'"),
        (lambda: ExpertWeights(Weight(stack(E, I, H)), Weight(stack(E, H, I))), "must have 2·I = 12 rows"),
        (
            lambda: ExpertWeights(Weight(stack(E, 2 * I, H)), Weight(stack(E, H, I)), gated=False),
            "must have I = 6 rows",
        ),
        (lambda: ExpertWeights(Weight(stack(E, 2 * I, H + 1)), Weight(stack(E, H, I))), "must take H = 8 columns"),
        (lambda: ExpertWeights(Weight(stack(E, 2 * I, H)), Weight(stack(E + 1, H, I))), "same number of experts"),
        (
            lambda: ExpertWeights(Weight(stack(E, 2 * I, H).half()), Weight(stack(E, H, I))),
            "must share dtype and device",
        ),
        (
            lambda: ExpertWeights((Weight(stack(E, I, H)),) * 2, Weight(stack(E, H, I)), interleaved=True),
            "gated and not interleaved",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()


def test_transposed_weights_are_read_through_a_view() -> None:
    data = torch.randn(E, H, 2 * I)
    weight = Weight(data, transposed=True)
    assert (weight.out_features, weight.in_features) == (2 * I, H)
    assert weight.stack_ENK().data_ptr() == data.data_ptr()
    data.zero_()  # in-place changes are seen
    assert not weight.matrices()[0].any()


def test_map_reaches_every_tensor_of_every_layout() -> None:
    listed = Weight([stack(2 * I, H) for _ in range(E)], bias=[stack(2 * I) for _ in range(E)])
    weights = ExpertWeights(listed, Weight(stack(E, H, I), bias=stack(E, H)))
    ones = weights.map(torch.ones_like)
    assert len(ones.tensors()) == 2 * E + 2
    assert all(bool(tensor.all()) for tensor in ones.tensors())


def test_cost_counts_what_is_read_and_multiplied() -> None:
    weights = ExpertWeights(Weight(stack(E, 2 * I, H).half()), Weight(stack(E, H, I).half()))
    assert bytes_per_expert(weights) == 3 * I * H * 2
    one = cost(weights, num_tokens=1, top_k=2)
    assert one.flops == 6 * 2 * I * H
    assert one.weight_bytes == pytest.approx(2 * 3 * I * H * 2)
    assert one.floor_us(bytes_per_s=1e6, flops_per_s=1e30) == pytest.approx(one.weight_bytes + one.activation_bytes)
    assert experts_hit(10**6, 2, E) == pytest.approx(E)
