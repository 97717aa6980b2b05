"""One matrix, or a batch of them, into a format and back.

Letters: N and K are the output and input size of a matrix.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import InvalidInput
from ..core.formats import Format
from .codes import decode, decode_scale, encode, scale_for


def quantize(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """The payload and the scales of dense matrices: values ≈ payload · scale.

    A block's scale is its amax / largest, rounded up to a power of two for e8m0; the payload is
    values / scale, in float32, rounded to nearest, ties to even. A block of zeros is zeros; one
    that holds a NaN or an infinite number is NaN as a whole.

    Args:
        values: (…, N, K) in any float dtype; float64 is rounded to float32 first.

    Returns:
        Payload (…, N, K), or (…, N, K/2) of 4 bits, and scales (…, *format.scale_shape(N, K)).

    Raises:
        InvalidInput: a format without scales; 4 bits and K no multiple of the block.

    >>> from moetor.core.formats import fp8
    >>> payload, scale = quantize(torch.tensor([[1.0, -3.0], [0.0, 6.0]]), fp8((0, 0)))
    >>> payload.float(), scale
    (tensor([[  72., -224.],
            [   0.,  448.]]), tensor([[0.0134]]))
    """
    if not format.quantized:
        raise InvalidInput(f"quantising needs a format with scales, got {format.name!r}")
    columns = values.shape[-1]
    if format.bits == 4 and columns % 32:
        raise InvalidInput(
            f"quantising to {format.name} needs an inner size divisible by 32, got {columns};"
            " pad the weights or use fp8"
        )
    scaled = values.detach().to(torch.float32, copy=True)  # divided in place
    scale = scale_for(_amax_of_blocks(scaled, format), format)
    for_each_block(scaled, decode_scale(scale, format), format, Tensor.div_)
    return encode(scaled, format), scale


def dequantize(data: Tensor, scale: Tensor, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """What payload and scales mean, (…, N, K): their products in float32, rounded to `dtype`.

    In float64 the products are exact. Scales of e8m0 make them exact in float32 too, down to its
    subnormal numbers.

    >>> from moetor.core.formats import fp8
    >>> format = fp8((1, 2))
    >>> dequantize(torch.tensor([[1.0, 2.0, 3.0]]).to(torch.float8_e4m3fn), torch.tensor([[10.0, 0.5]]), format)
    tensor([[10.0000, 20.0000,  1.5000]])
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = decode(data, format, wide)
    for_each_block(values, decode_scale(scale, format, wide), format, Tensor.mul_)
    return values.to(dtype)


def for_each_block(values: Tensor, scale: Tensor, format: Format, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
    """apply(block, its scale), in place, for every block of values (…, N, K), partial ones included.

    Scales are spread over rows only; over columns they broadcast, so that nothing as large as the
    matrix is made.
    """
    assert format.block is not None
    rows, columns = values.shape[-2:]
    high, wide = format.block[0] or rows, format.block[1] or columns
    if high > 1:
        scale = scale.repeat_interleave(high, dim=-2)[..., :rows, :]
    whole = columns - columns % wide
    if whole:
        apply(values[..., :whole].unflatten(-1, (-1, wide)), scale[..., : whole // wide, None])
    if whole < columns:
        apply(values[..., whole:], scale[..., -1:])


def _amax_of_blocks(values: Tensor, format: Format) -> Tensor:
    assert format.block is not None
    rows, columns = values.shape[-2:]
    high, wide = format.block[0] or rows, format.block[1] or columns
    if rows % high or columns % wide:
        values = F.pad(values, (0, -columns % wide, 0, -rows % high))
    # sizes are spelt out: there may be no rows at all, as for activations of no tokens
    padded_rows, padded_columns = values.shape[-2:]
    blocks: Tensor = values.unflatten(-1, (padded_columns // wide, wide)).unflatten(-3, (padded_rows // high, high))
    return blocks.abs().amax((-3, -1))
