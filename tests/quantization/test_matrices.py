"""Matrices into formats and back: blocks that do not divide, zeros, NaN, and errors as large as they should be."""

import pytest
import torch

from moetor import InvalidInput
from moetor.core.formats import FORMATS, Format, fp8, mxfp4
from moetor.quantization import dequantize, quantize
from moetor.quantization.codes import decode, decode_scale

BLOCKS = [(128, 128), (64, 32), (0, 0), (1, 0), (1, 128), (7, 5)]
SIZES = [(128, 256), (576, 320), (1, 1), (5, 129), (130, 127)]


def by_hand(payload: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """W[n, k] = q[n, k] · scale[n // high, k // wide], in float64."""
    q = decode(payload, format).double()
    high, wide = (size or extent for size, extent in zip(format.block, q.shape, strict=True))
    rows, columns = torch.arange(q.shape[0]) // high, torch.arange(q.shape[1]) // wide
    return q * decode_scale(scale, format).double()[rows][:, columns]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scale_kind", ["float32", "e8m0"])
def test_a_scale_multiplies_its_block_and_no_other(block, size, scale_kind: str) -> None:
    format = fp8(block, scale_kind)
    payload, scale = quantize(torch.randn(size) * 10 ** torch.randn(size[0], 1), format)
    assert payload.shape == size
    assert scale.shape == format.scale_shape(*size)
    expected = by_hand(payload, scale, format)
    assert torch.equal(dequantize(payload, scale, format, torch.float64), expected)
    assert torch.equal(dequantize(payload, scale, format), expected.float())
    assert torch.equal(dequantize(payload, scale, format, torch.bfloat16), expected.float().bfloat16())


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("scale_kind", ["float32", "e8m0"])
def test_every_number_is_as_near_as_its_block_allows(block, scale_kind: str) -> None:
    """Within half a step of the payload: 1/16 of the number, or half the smallest step, times the scale."""
    format, values = fp8(block, scale_kind), torch.randn(200, 150)
    payload, scale = quantize(values, format)
    step = by_hand(torch.ones_like(values).to(torch.float8_e4m3fn), scale, format) * 2**-9
    error = (dequantize(payload, scale, format, torch.float64) - values.double()).abs()
    # the quotient is rounded to float32 first
    assert (error <= torch.maximum(values.double().abs() / 16, step / 2) * (1 + 1e-6)).all()


def test_batches_are_matrices_side_by_side() -> None:
    values, format = torch.randn(3, 200, 160), FORMATS["fp8"]
    payload, scale = quantize(values, format)
    for index in range(3):
        one_payload, one_scale = quantize(values[index], format)
        assert torch.equal(payload[index].view(torch.uint8), one_payload.view(torch.uint8))
        assert torch.equal(scale[index], one_scale)


@pytest.mark.parametrize("format", [f for f in FORMATS.values() if f.quantized], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_came_out_goes_in_again_bit_for_bit(format: Format, dtype: torch.dtype) -> None:
    """Dequantised numbers are the format's own; with powers of two nothing is lost on the way back."""
    values = torch.randn(160, 192).to(dtype)
    payload, scale = quantize(values, format)
    back = dequantize(payload, scale, format)
    again, scale_again = quantize(back, format)
    error = ((dequantize(again, scale_again, format) - back).norm() / back.norm()).item()
    assert error <= (0 if format.scale == "e8m0" else 1e-6)


@pytest.mark.parametrize("format", [fp8(), fp8(scale="e8m0"), mxfp4()], ids=lambda f: f.name)
def test_zeros_stay_zeros_and_numbers_next_to_nothing_finite(format: Format) -> None:
    values = torch.zeros(256, 256)
    values[128:, 128:] = 1e-44
    values[:128, 128:] = 1e30
    back = dequantize(*quantize(values, format), format)
    assert torch.equal(back[:, :128], torch.zeros(256, 128))
    assert back.isfinite().all()
    torch.testing.assert_close(back[:128, 128:], values[:128, 128:], rtol=0.07 if format.bits == 8 else 0.3, atol=0)


@pytest.mark.parametrize("format", [fp8((128, 128)), fp8(scale="e8m0"), mxfp4()], ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_is_nan_and_the_others_are_not(format: Format, bad: float) -> None:
    values = torch.randn(256, 256)
    values[130, 140] = bad
    back = dequantize(*quantize(values, format), format)
    high, wide = format.block
    rows, columns = 130 // high * high, 140 // wide * wide
    assert back[rows : rows + high, columns : columns + wide].isnan().all()
    assert back.isnan().sum() == high * wide


@pytest.mark.parametrize("columns", [1000, 33, 1])
def test_fp4_needs_whole_blocks(columns: int) -> None:
    with pytest.raises(InvalidInput, match=f"mxfp4 needs an inner size divisible by 32, got {columns}; pad"):
        quantize(torch.randn(4, columns), mxfp4())


def test_dense_is_no_format_to_quantise_to() -> None:
    with pytest.raises(InvalidInput, match="needs a format with scales, got 'dense'"):
        quantize(torch.randn(4, 4), FORMATS["dense"])


def test_scales_rounded_to_powers_of_two_afterwards_are_wrong() -> None:
    """Why `scale_for` rounds before the payload is made: the other order is off by tens of percent."""
    values, wrong, right = torch.randn(256, 256), fp8(), fp8(scale="e8m0")
    payload, scale = quantize(values, wrong)
    rounded_up = torch.exp2(torch.log2(scale).ceil())

    def error(back: torch.Tensor) -> float:
        return ((back - values).norm() / values.norm()).item()

    assert error(dequantize(*quantize(values, right), right)) < 0.03
    assert error(dequantize(payload, rounded_up, wrong)) > 0.1
