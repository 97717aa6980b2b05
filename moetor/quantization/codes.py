"""The small numbers that formats are made of: e4m3, pairs of e2m1, and scales.

A byte means what a table of 256 numbers says. Tables are made at each call, by a few operations on
the tensor's own device: kept ones would have to follow devices, tracing and inference mode.
(On a CPU a table also reads e4m3 four times as fast as torch's own conversion: 8.6 ms instead of
40 for 5.8 million numbers, torch 2.13, one thread.)
"""

import torch
from torch import Tensor

from ..core.formats import Format

# The least scale of blocks that are all but zero: the smallest float32 that is not subnormal, so
# that zeros stay zeros and nothing is divided by zero.
SMALLEST_SCALE = 2.0**-126


def decode(data: Tensor, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """The payload's numbers q, without their scale.

    Args:
        data: (…, N, K), or (…, N, K/2) of two numbers a byte.
        dtype: float32 or float64.

    Returns:
        (…, N, K), new memory.

    >>> from moetor.core.formats import mxfp4
    >>> decode(torch.tensor([[0x21, 0x7F]], dtype=torch.uint8), mxfp4())
    tensor([[ 0.5000,  1.0000, -6.0000,  6.0000]])
    """
    index = data.view(torch.uint8).reshape(-1).int()
    if format.bits == 8:
        return _all_bytes(data.device).view(torch.float8_e4m3fn).to(dtype).index_select(0, index).view(data.shape)
    # Two float32 travel as one float64, as fast as one number: a row of two takes seven times as long.
    pairs = _pairs_of_e2m1(data.device).view(torch.float64).flatten()
    return pairs.index_select(0, index).view(torch.float32).view(*data.shape[:-1], -1).to(dtype)


def encode(values: Tensor, format: Format) -> Tensor:
    """The nearest payload numbers, ties to even, beyond the largest the largest.

    Args:
        values: (…, N, K) float32, divided by their scale already. NaN stays NaN in e4m3; e2m1 has
            none, there the scale is.

    Returns:
        (…, N, K) or, of two numbers a byte, (…, N, K/2), in the format's first dtype.

    >>> from moetor.core.formats import mxfp4
    >>> encode(torch.tensor([[0.6, 1.1, -7.0, 5.0]]), mxfp4())
    tensor([[ 33, 111]], dtype=torch.int8)
    """
    dtype = format.payload_dtypes[0]
    if format.bits == 8:
        # torch 2.11 turns what is too large into NaN
        return values.clamp(-format.largest, format.largest).to(dtype)
    # what a NaN becomes as an integer is undefined; its scale is NaN already
    size = torch.nan_to_num(values.abs()).clamp(max=format.largest)
    # Steps are 1/2 below 2, 1 below 4, 2 below 6; torch.round takes ties to even, as the codes 0 to 7 do.
    code = torch.where(size < 2, (2 * size).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    nibble = code.to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    return (nibble[..., 0::2] | (nibble[..., 1::2] << 4)).view(dtype)


def decode_scale(scale: Tensor, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scales as numbers; the byte b of e8m0 is 2^(b − 127), and 255 is NaN.

    >>> from moetor.core.formats import mxfp4
    >>> decode_scale(torch.tensor([127, 130], dtype=torch.uint8), mxfp4())
    tensor([1., 8.])
    """
    return (scale.view(torch.float8_e8m0fnu) if format.scale == "e8m0" else scale).to(dtype)


def scale_for(amax: Tensor, format: Format) -> Tensor:
    """The scale, as it is stored, with which the largest number of a block just fits the payload.

    A block of NaN or infinite numbers gets a scale that makes all of it NaN.

    Args:
        amax: float32, the largest absolute values.

    >>> from moetor.core.formats import fp8
    >>> scale_for(torch.tensor([448.0, 449.0, 0.0]), fp8(scale="e8m0")).float().tolist()[:2]
    [1.0, 2.0]
    """
    scale = (amax / format.largest).clamp(min=SMALLEST_SCALE)
    if format.scale == "float32":
        return torch.where(scale.isfinite(), scale, torch.nan)
    # Up to the next power of two *before* the payload is made: a scale that is rounded afterwards
    # no longer belongs to its payload.
    mantissa, exponent = torch.frexp(scale)
    byte = exponent - (mantissa == 0.5).int() + 127
    return torch.where(scale.isfinite(), byte, 255).to(torch.uint8).view(torch.float8_e8m0fnu)


def _all_bytes(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device)


def _pairs_of_e2m1(device: torch.device) -> Tensor:
    """(256, 2) float32: the number in the low nibble of each byte, then that in the high one."""
    byte = _all_bytes(device).int()
    code = torch.stack((byte & 15, byte >> 4), dim=1)
    size = code & 7
    # sign, two bits of exponent, one of mantissa; 0 and 1/2 are the subnormal ones
    quarters = torch.where(size < 2, 2 * size, (2 + (size & 1)) << (size >> 1)).float()
    return torch.where(code < 8, quarters, -quarters) / 4
