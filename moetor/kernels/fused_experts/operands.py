"""One product's matrices as a kernel sees them: tensors, and numbers to find a column in them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Matrices:
    """One product's matrices as a kernel sees them: where column n of expert e begins, and for gate and up.

    Attributes:
        first, second: tensors that hold gate and up; the same one unless they are stored apart.
        N: columns of one of them.
        strides: from expert to expert, column to column, along the depth.
        offset: elements from a gate column to its up column, in `second`.
        bias_*: the same for the biases.
    """

    first: Tensor
    second: Tensor
    N: int
    strides: tuple[int, int, int]
    offset: int
    bias_first: Tensor | None
    bias_second: Tensor | None
    bias_strides: tuple[int, int]
    bias_offset: int


def matrices(stored: list[Tensor], biases: list[Tensor], gated: bool, interleaved: bool) -> Matrices:
    whole, second = stored[0], stored[-1]
    N = whole.shape[1]
    outer, row, column = whole.stride()
    bias = biases[0] if biases else None
    bias_outer, bias_row = bias.stride() if bias is not None else (0, 0)
    offset = bias_offset = 0
    if gated and len(stored) == 1:
        N //= 2
        if interleaved:
            offset, bias_offset, row, bias_row = row, bias_row, 2 * row, 2 * bias_row
        else:
            offset, bias_offset = N * row, N * bias_row
    strides, bias_strides = (outer, row, column), (bias_outer, bias_row)
    return Matrices(whole, second, N, strides, offset, bias, biases[-1] if biases else None, bias_strides, bias_offset)
