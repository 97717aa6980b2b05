"""Layers in a format: what they give, what it costs, and what does not fit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moetor import Activation, BackendRefused, ExpertWeights, InvalidInput, Weight, experts_forward
from moetor.core.cost import bytes_per_expert
from moetor.core.formats import FORMATS, Format, fp8
from moetor.quantization import dequantize_experts, quantize, quantize_experts, split_gate_up, weight_of_blocks
from moetor.testing import relative_error

E, H, I, K, T = 8, 512, 256, 4, 64


class Layer:
    """A layer of the sizes that the expected errors below are for, one call of it, and what float64 gives."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(E, 2 * I, H, generator=generator) * H**-0.5
        down = torch.randn(E, H, I, generator=generator) * I**-0.5
        self.dense = ExpertWeights(Weight(up), Weight(down))
        self.x = torch.randn(T, H, generator=generator)
        self.ids = torch.rand(T, E, generator=generator).topk(K, dim=1).indices
        self.routing = torch.rand(T, K, generator=generator)
        self.exact = self.run(self.dense.map(Tensor.double), self.x.double())

    def run(self, weights: ExpertWeights, x: Tensor | None = None) -> Tensor:
        return experts_forward(weights, self.x if x is None else x, self.ids, self.routing, "eager")

    def error(self, weights: ExpertWeights, x: Tensor | None = None) -> float:
        """Relative to the unquantised layer in float64."""
        return relative_error(self.run(weights, x), self.exact)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("fp8_weights", 4.6e-2),
        ("fp8_e8m0_weights", 4.6e-2),
        ("fp8_tensor_weights", 4.6e-2),
        ("fp8", 6.3e-2),
        ("fp8_e8m0", 6.3e-2),
        ("fp8_tensor", 6.3e-2),
        ("mxfp4", 0.20),
        ("mxfp4_dynamic", 0.205),
        ("mxfp4_float32", 0.175),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_against_the_unquantised_layer_is_the_expected_one(
    layer: Layer, format: str, expected: float, dtype: torch.dtype
) -> None:
    assert layer.error(quantize_experts(layer.dense, format), layer.x.to(dtype)) == pytest.approx(expected, rel=0.06)


def test_dense_errors_are_the_expected_ones(layer: Layer) -> None:
    for dtype, limit in ((torch.float32, 7e-7), (torch.bfloat16, 6e-3), (torch.float16, 7e-4)):
        assert layer.error(layer.dense.map(lambda t, dtype=dtype: t.to(dtype)), layer.x.to(dtype)) <= limit


def test_what_is_wrong_on_purpose_has_the_error_that_tells_it(layer: Layer) -> None:
    """Each is far from the errors above, so that a limit on them finds it."""
    fp8_weights = quantize_experts(layer.dense, "fp8_weights")
    up, down = fp8_weights.up, fp8_weights.down
    assert isinstance(up, Weight)

    def rounded_up(weight: Weight) -> Weight:
        return replace(weight, scale=torch.exp2(torch.log2(weight.scale).ceil()))

    assert layer.error(replace(fp8_weights, up=rounded_up(up), down=rounded_up(down))) > 0.5
    gate_too_large = up.scale.clone()
    gate_too_large[:, : I // 128] *= 1.2545
    assert layer.error(replace(fp8_weights, up=replace(up, scale=gate_too_large))) == pytest.approx(0.31, rel=0.05)

    interleaved_up = torch.stack(layer.dense.up.data.chunk(2, dim=1), dim=2).flatten(1, 2)
    interleaved = quantize_experts(replace(layer.dense, up=Weight(interleaved_up), interleaved=True), "fp8_weights")
    assert layer.error(interleaved) == pytest.approx(4.6e-2, rel=0.05)
    assert layer.error(replace(interleaved, interleaved=False)) == pytest.approx(1.42, rel=0.05)

    def swapped(weight: Weight) -> Weight:
        byte = weight.data.view(torch.uint8)
        return replace(weight, data=(byte >> 4 | byte << 4).view(torch.int8))

    fp4 = quantize_experts(layer.dense, "mxfp4")
    assert layer.error(replace(fp4, up=swapped(fp4.up), down=swapped(fp4.down))) == pytest.approx(1.44, rel=0.05)


@pytest.mark.parametrize("format", [f for f in FORMATS.values() if f.quantized and not f.activation_scheme])
def test_weights_only_is_the_dequantised_layer(layer: Layer, format: Format) -> None:
    quantized = quantize_experts(layer.dense, format)
    twin = dequantize_experts(quantized, torch.float32)
    assert not twin.quantized
    assert relative_error(layer.run(quantized), layer.run(twin)) <= 1e-6
    assert bytes_per_expert(quantized) == format.bits / 8 * 3 * I * H


@pytest.mark.parametrize("format", ["mxfp4", "fp8_e8m0"])
def test_with_powers_of_two_dequantising_and_quantising_again_loses_nothing(layer: Layer, format: str) -> None:
    """The numbers are the same; a block whose largest was rounded down may find a smaller scale for them."""
    once = dequantize_experts(quantize_experts(layer.dense, format))
    twice = dequantize_experts(quantize_experts(once, format))
    assert all(torch.equal(*pair) for pair in zip(once.tensors(), twice.tensors(), strict=True))


def test_layout_of_the_dense_layer_does_not_matter(layer: Layer) -> None:
    """Stored (in, out), as a pair, or one tensor an expert: the same numbers."""
    up, down = layer.dense.up, layer.dense.down
    expected = layer.run(quantize_experts(layer.dense, "fp8"))
    turned = (Weight(w.data.transpose(1, 2).contiguous(), transposed=True) for w in (up, down))
    pair = tuple(Weight(half) for half in up.data.chunk(2, dim=1))
    listed = (Weight([one.clone() for one in w.data]) for w in (up, down))
    for weights in (
        ExpertWeights(*turned),
        ExpertWeights(pair, down),
        ExpertWeights(*listed),
    ):
        quantized = quantize_experts(weights, "fp8")
        assert not any(w.transposed for w in quantized.all)
        assert torch.equal(layer.run(quantized), expected)
        assert all(one.is_contiguous() for one in quantized.tensors())


def test_biases_and_gate_stay(layer: Layer) -> None:
    bias, gate = torch.randn(E, 2 * I), Activation("silu", limit=0.5, up_offset=1.0)
    dense = replace(layer.dense, up=replace(layer.dense.up, bias=bias), activation=gate)
    quantized = quantize_experts(dense, "fp8_e8m0")
    assert quantized.up.bias is bias
    assert quantized.activation is gate
    assert layer.run(quantized).sub(layer.run(dense)).norm() <= 0.07 * layer.run(dense).norm()


def test_static_scales_saturate_and_are_per_expert(layer: Layer) -> None:
    ample = (torch.full((E,), 6 / 448), torch.full((E,), 6 / 448))
    quantized = quantize_experts(layer.dense, "fp8_tensor_static", ample)
    assert layer.error(quantized) == pytest.approx(6.4e-2, rel=0.1)
    small = ample[0].clone()
    small[3] /= 100
    only_one = quantize_experts(layer.dense, "fp8_tensor_static", (small, ample[1]))
    differs = (layer.run(only_one) != layer.run(quantized)).any(1)
    assert torch.equal(differs, (layer.ids == 3).any(1))


def test_gate_and_up_quantised_apart_are_a_pair_of_views(layer: Layer) -> None:
    """Per-tensor scales (E, 2, 1), and blocks that begin anew where the up rows do."""
    for format, sizes in ((fp8((0, 0)), 1), (fp8((96, 128)), -(-I // 96))):
        parts = [quantize(half, format) for half in layer.dense.up.data.chunk(2, dim=1)]
        data = torch.cat([payload.view(torch.uint8) for payload, _ in parts], dim=1).view(torch.float8_e4m3fn)
        scale = torch.cat([scale for _, scale in parts], dim=1)
        assert scale.shape[1] == 2 * sizes
        gate, up = split_gate_up(data, scale, format)
        assert up.data.data_ptr() == data.data_ptr() + I * H
        pair = tuple(Weight(half) for half in layer.dense.up.data.chunk(2, dim=1))
        expected = quantize_experts(replace(layer.dense, up=pair), format)
        assert torch.equal(layer.run(replace(expected, up=(gate, up))), layer.run(expected))
    with pytest.raises(InvalidInput, match="as many rows and scales each, got 512 rows and 3 rows of scales"):
        split_gate_up(data, scale[:, :3], format)


def test_blocks_of_gpt_oss_files_are_read_as_they_lie(layer: Layer) -> None:
    quantized = quantize_experts(layer.dense, "mxfp4")
    blocks = quantized.up.data.view(torch.uint8).view(E, 2 * I, H // 32, 16)
    weight = weight_of_blocks(blocks, quantized.up.scale.view(torch.uint8))
    assert weight.data.data_ptr() == blocks.data_ptr()
    down = weight_of_blocks(quantized.down.data.view(torch.uint8).view(E, H, I // 32, 16), quantized.down.scale)
    assert torch.equal(layer.run(replace(quantized, up=weight, down=down)), layer.run(quantized))
    with pytest.raises(InvalidInput, match=r"must be \(E, N, K/32, 16\) of uint8, got \(8, 512, 256\)"):
        weight_of_blocks(quantized.up.data, quantized.up.scale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp9",), "unknown format 'fp9'; known: dense, "),
        (("dense",), "needs a format with scales, got 'dense'"),
        (("fp8_tensor_static",), "needs activation_scales from a calibration, got none"),
    ],
)
def test_what_cannot_be_quantised_says_why(layer: Layer, arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        quantize_experts(layer.dense, *arguments)


def test_quantised_experts_are_not_quantised_again(layer: Layer) -> None:
    with pytest.raises(InvalidInput, match="needs dense experts, got fp8; dequantise them first"):
        quantize_experts(quantize_experts(layer.dense, "fp8"), "mxfp4")


def test_fp4_of_sizes_that_are_no_multiple_of_32_is_refused() -> None:
    dense = ExpertWeights(Weight(torch.ones(2, 40, 48)), Weight(torch.ones(2, 48, 20)))
    with pytest.raises(InvalidInput, match="divisible by 32, got 48; pad the weights or use fp8"):
        quantize_experts(dense, "mxfp4")


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_no_more_than_one_expert_is_dequantised_at_a_time_in_either_direction(layer: Layer, format: str) -> None:
    quantized, x = quantize_experts(layer.dense, format), layer.x.clone().requires_grad_()
    with LargestTensor() as largest:
        layer.run(quantized, x).sum().backward()
    assert x.grad is not None
    assert largest.elements == 2 * I * H  # one expert's first matrix
    with LargestTensor() as largest:
        quantize_experts(layer.dense, format)
    assert largest.elements <= E * 2 * I * H  # the result


@pytest.mark.parametrize("part", ["data", "scale"])
def test_gradients_of_frozen_parts_are_refused_and_not_forgotten(layer: Layer, part: str) -> None:
    quantized = quantize_experts(layer.dense, "fp8")
    thawed = getattr(quantized.down, part).clone().requires_grad_()
    weights = replace(quantized, down=replace(quantized.down, **{part: thawed}))
    with pytest.raises(BackendRefused, match="gives no gradients to weights of format fp8; freeze them"):
        layer.run(weights)
    with torch.no_grad():
        layer.run(weights)
