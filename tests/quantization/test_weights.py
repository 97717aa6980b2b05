"""Payload and scales must fit their format; what does not is one error that says what is needed."""

import pytest
import torch
from torch import Tensor

from moetor import ExpertWeights, InvalidInput, Weight
from moetor.core.formats import fp8, mxfp4

E, N, K = 3, 320, 192
FP8, FP4, E8M0 = torch.float8_e4m3fn, torch.int8, torch.float8_e8m0fnu


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(shape, dtype=dtype)


def payload(dtype: torch.dtype = FP8, columns: int = K) -> Tensor:
    return zeros(E, N, columns, dtype=dtype)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Weight(payload(), format="fp8"), r"format 'fp8' need scales \(E, 3, 2\), got none"),
        (
            lambda: Weight(payload(), scale=zeros(E, 2, 3), format="fp8"),
            r"matrices \(320, 192\) need scales \(E, 3, 2\) with E = 3, one a block of \(128, 128\), got \(3, 2, 3\)",
        ),
        (lambda: Weight(payload(), scale=zeros(E + 1, 3, 2), format="fp8"), r"with E = 3, .* got \(4, 3, 2\)"),
        (lambda: Weight(payload(), scale=zeros(3, 2), format="fp8"), r"got \(3, 2\)"),
        (lambda: Weight(payload(), scale=zeros(E, 2, 1), format="fp8_tensor"), r"got \(3, 2, 1\); .*split_gate_up"),
        (
            lambda: Weight(payload(), scale=zeros(E, 3, 2, dtype=torch.bfloat16), format="fp8"),
            "need scales of torch.float32 on cpu, got torch.bfloat16 on cpu",
        ),
        (
            lambda: Weight(payload(), scale=zeros(E, 3, 2, dtype=torch.uint8), format="fp8"),
            "need scales of torch.float32 on cpu, got torch.uint8",
        ),
        (
            lambda: Weight(payload(), scale=zeros(E, 3, 2), format="fp8_e8m0"),
            "need scales of torch.float8_e8m0fnu or torch.uint8 on cpu, got torch.float32",
        ),
        (lambda: Weight(payload(), scale=zeros(E, 3, 2).to("meta"), format="fp8"), "on cpu, got torch.float32 on meta"),
        (
            lambda: Weight(payload(FP4), scale=zeros(E, 3, 2), format="fp8"),
            "need a payload of torch.float8_e4m3fn, got torch.int8",
        ),
        (
            lambda: Weight(payload(torch.float8_e5m2), scale=zeros(E, 3, 2), format="fp8"),
            "need a payload of torch.float8_e4m3fn, got torch.float8_e5m2",
        ),
        (
            lambda: Weight(payload(FP4, 24), scale=zeros(E, N, 2, dtype=E8M0), format="mxfp4"),
            "need an inner size divisible by 32, got 48",
        ),
        (
            lambda: Weight(payload(FP4, 96), scale=zeros(E, N, 3, dtype=E8M0), format="mxfp4"),
            r"matrices \(320, 192\) need scales \(E, 320, 6\)",
        ),
        (
            lambda: Weight(payload(), scale=zeros(E, 2, 3), format="fp8", transposed=True),
            r"are stored \(E, out, in\), got transposed=True",
        ),
        (
            lambda: Weight(payload(), scale=zeros(E, 1, 1), format="fp8_tensor_static"),
            r"need a static activation scale \(E,\), got None",
        ),
        (
            lambda: Weight(payload(), scale=zeros(E, 3, 2), format="fp8", activation_scale=zeros(E)),
            r"need no activation scale, got \(3,\)",
        ),
        (
            lambda: Weight(
                payload(), scale=zeros(E, 1, 1), format="fp8_tensor_static", activation_scale=zeros(E, 1, 1)
            ),
            r"static activation scales \(E,\) = \(3,\) of torch.float32 on cpu, got \(3, 1, 1\)",
        ),
        (
            lambda: Weight(list(payload()), scale=zeros(E, 3, 2), format="fp8"),
            "scales stored as the payload is",
        ),
        (
            lambda: Weight(list(payload()), scale=[zeros(3, 2), zeros(3, 2), zeros(2, 3)], format="fp8"),
            r"got \[\(3, 2\), \(3, 2\), \(2, 3\)\]",
        ),
        (lambda: Weight(zeros(E, N, K), activation_scale=zeros(E)), "format 'dense' have no scale"),
        (lambda: Weight(payload(), scale=zeros(E, 3, 2)), "format 'dense' have no scale; name the format"),
        (
            lambda: ExpertWeights(
                Weight(zeros(E, 64, 32, dtype=FP8), scale=zeros(E, 1, 1), format="fp8"), Weight(zeros(E, 32, 32))
            ),
            "must share dtype and device",
        ),
        (
            lambda: ExpertWeights(
                Weight(zeros(E, 64, 32, dtype=FP8), scale=zeros(E, 1, 1), format="fp8"),
                Weight(zeros(E, 32, 32, dtype=FP8), scale=zeros(E, 1, 1), format="fp8_weights"),
            ),
            "must be of one format, got",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()


def test_sizes_are_those_of_the_matrices_not_of_the_bytes() -> None:
    up = Weight(zeros(E, 64, 48, dtype=FP4), scale=zeros(E, 64, 3, dtype=torch.uint8), format="mxfp4")
    down = Weight(zeros(E, 96, 16, dtype=FP4), scale=zeros(E, 96, 1, dtype=torch.uint8), format="mxfp4")
    weights = ExpertWeights(up, down)
    assert (weights.hidden_size, weights.intermediate_size, up.in_features) == (96, 32, 96)
    assert weights.quantized
    with pytest.raises(InvalidInput, match="must take H = 64 columns"):
        ExpertWeights(up, Weight(down.data[:, :64], scale=down.scale[:, :64], format="mxfp4"))


def test_tensors_are_payload_then_scales_then_bias() -> None:
    data, scale, static, bias = payload(), zeros(E, 1, 1), zeros(E), zeros(E, N)
    weight = Weight(data, bias, scale, "fp8_tensor_static", activation_scale=static)
    for got, want in zip(weight.tensors(), (data, scale, static, bias), strict=True):
        assert got is want
    assert [t is want for t, want in zip(weight.frozen_tensors(), (data, scale, static), strict=True)] == [True] * 3
    assert weight.bias_tensors()[0] is bias


def test_any_block_and_either_byte_of_an_exponent_will_do() -> None:
    Weight(payload(), scale=zeros(E, 5, 12), format=fp8((64, 16)).name)
    Weight(payload(), scale=zeros(E, N, 1), format=fp8((1, 0)).name)
    for dtype in (E8M0, torch.uint8):
        Weight(payload(torch.uint8, 96), scale=zeros(E, N, 6, dtype=dtype), format=mxfp4().name)
