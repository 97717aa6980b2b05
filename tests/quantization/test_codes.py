"""Every code of every small number, and every tie between two, against arithmetic done by hand."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from moetor.core.formats import fp8, mxfp4
from moetor.quantization.codes import SMALLEST_SCALE, decode, decode_scale, encode, scale_for

FP8, FP4 = fp8((0, 0)), mxfp4()
E8M0 = fp8((0, 0), "e8m0")


def e4m3(code: int) -> float:
    """One sign, four bits of exponent with bias 7, three of mantissa; the last code is NaN and none is infinite."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = Fraction(mantissa, 8) / 64 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return math.copysign(float(size), -1.0 if code & 128 else 1.0)


def e2m1(code: int) -> float:
    return math.copysign([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7], -1.0 if code & 8 else 1.0)


def same(got: torch.Tensor, expected: list[float]) -> None:
    """Equal as numbers, NaN for NaN, and zeros by their sign."""
    want = torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(torch.nan_to_num(got.double(), nan=777.0), torch.nan_to_num(want, nan=777.0))
    zero = want == 0
    assert torch.equal(got[zero].signbit(), want[zero].signbit())


ALL_BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_of_e4m3_is_decoded(dtype: torch.dtype) -> None:
    decoded = decode(ALL_BYTES.view(torch.float8_e4m3fn), FP8, dtype)
    assert decoded.dtype == dtype
    same(decoded, [e4m3(code) for code in range(256)])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_every_byte_of_e2m1_is_two_numbers_the_low_nibble_first(dtype: torch.dtype) -> None:
    decoded = decode(ALL_BYTES.view(dtype), FP4)
    same(decoded, [e2m1(nibble) for byte in range(256) for nibble in (byte & 15, byte >> 4)])


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_every_byte_of_e8m0_is_a_power_of_two(dtype: torch.dtype) -> None:
    """Byte 0 is 2^-127, which is subnormal in float32; 255 is NaN."""
    same(decode_scale(ALL_BYTES.view(dtype), E8M0), [2.0 ** (byte - 127) for byte in range(255)] + [math.nan])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_decoding_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    """transformers changes it while it loads a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        pairs = decode(ALL_BYTES, FP4)
        code = encode(torch.tensor([[0.6, 1.1]], dtype=torch.float32), FP4)
    finally:
        torch.set_default_dtype(before)
    assert pairs.dtype == torch.float32
    assert torch.equal(pairs, decode(ALL_BYTES, FP4))
    assert code.item() == 0x21


@pytest.mark.parametrize("byte_order", ["contiguous", "strided", "transposed"])
def test_payload_is_read_through_its_strides(byte_order: str) -> None:
    payload = torch.randint(0, 255, (5, 6), dtype=torch.uint8)
    seen = {
        "contiguous": payload,
        "strided": payload.new_zeros(5, 9)[:, :6].copy_(payload),
        "transposed": payload.t().contiguous().t(),
    }[byte_order]
    assert torch.equal(decode(seen, FP4), decode(payload, FP4))


FINITE = {"fp8": [e4m3(code) for code in range(127)], "fp4": [e2m1(code) for code in range(8)]}


@pytest.mark.parametrize("name", ["fp8", "fp4"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_numbers_of_a_format_are_encoded_as_themselves(name: str, sign: float) -> None:
    format = {"fp8": FP8, "fp4": FP4}[name]
    values = sign * torch.tensor(FINITE[name] + [0.0] * (len(FINITE[name]) % 2))
    same(decode(encode(values, format), format), values.tolist())


@pytest.mark.parametrize("name", ["fp8", "fp4"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_between_two_numbers_the_nearest_wins_and_a_tie_goes_to_the_even_code(name: str, sign: float) -> None:
    """At each midpoint, one float32 below it, and one above it."""
    format, numbers = {"fp8": (FP8, FINITE["fp8"]), "fp4": (FP4, FINITE["fp4"])}[name]
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(numbers)])
    below, above = middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(torch.inf))
    expected = {
        "below": numbers[:-1],
        "middle": [numbers[low + low % 2] for low in range(len(middles))],
        "above": numbers[1:],
    }
    for values, want in zip((below, middles, above), expected.values(), strict=True):
        padded = torch.cat((values, values.new_zeros(len(values) % 2)))
        got = decode(encode(sign * padded, format), format)[: len(values)]
        same(got, [math.copysign(number, sign) for number in want])


@pytest.mark.parametrize("format", [FP8, FP4], ids=lambda format: format.name)
def test_beyond_the_largest_number_is_the_largest(format) -> None:
    huge = torch.tensor([1.001, 1.07, 2.0, 1e30, torch.inf, -1.04, -3e4, -torch.inf]) * format.largest
    assert decode(encode(huge, format), format).tolist() == [format.largest] * 5 + [-format.largest] * 3


def test_nan_stays_nan_in_e4m3() -> None:
    assert decode(encode(torch.tensor([torch.nan, 1.0]), FP8), FP8).isnan().tolist() == [True, False]


@pytest.mark.parametrize("format", [E8M0, FP4], ids=lambda format: format.name)
def test_e8m0_scales_are_the_least_power_of_two_that_fits(format) -> None:
    exponents = torch.arange(-120, 119, dtype=torch.float64)
    # amax = largest · 2^k fits 2^k exactly; the next float32 needs 2^(k+1)
    exact = (format.largest * torch.exp2(exponents)).float()
    assert torch.equal(scale_for(exact, format).double(), torch.exp2(exponents))
    larger = exact * (1 + 2.0**-20)
    assert torch.equal(scale_for(larger, format).double(), torch.exp2(exponents + 1))


@pytest.mark.parametrize("format", [FP8, E8M0, FP4], ids=lambda format: format.name)
def test_scale_of_nothing_is_small_and_that_of_nan_is_nan(format) -> None:
    tiny = scale_for(torch.tensor([0.0, 1e-45, 1e-38]), format)
    assert decode_scale(tiny, format).tolist() == [SMALLEST_SCALE] * 3
    assert decode_scale(scale_for(torch.tensor([torch.nan, torch.inf]), format), format).isnan().all()
