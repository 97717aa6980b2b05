"""A call's tensors, and one product's matrices as a kernel sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# The operators' arguments after x, ids and routing: the layer's tensors, then the numbers of its gate.
LAYER = (
    "Tensor[] up, Tensor[] up_bias, Tensor down, Tensor? down_bias, bool gated, bool interleaved, str kind,"
    " float alpha, float? limit, bool limit_after, float up_offset, float? gate_softcap, float? up_softcap"
)


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


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one call, as `op.fused_experts` takes them; ids and routing contiguous."""

    x: Tensor
    ids: Tensor
    routing: Tensor
    up: list[Tensor]
    up_bias: list[Tensor]
    down: Tensor
    down_bias: Tensor | None
    gated: bool
    interleaved: bool

    @property
    def order(self) -> str:
        """How gate and up columns lie: "stacked" or "interleaved" in one tensor, "apart" in two, "single": no gate."""
        if not self.gated:
            return "single"
        return "interleaved" if self.interleaved else "apart" if len(self.up) > 1 else "stacked"

    def first(self) -> Matrices:
        return _matrices(self.up, self.up_bias, self.gated, self.interleaved)

    def second(self) -> Matrices:
        return _matrices([self.down], [] if self.down_bias is None else [self.down_bias], False, False)


def call_of(x: Tensor, ids: Tensor, routing: Tensor, *layer: Any) -> Call:
    """The tensors, out of an operator's arguments."""
    return Call(x, ids.contiguous(), routing.contiguous(), *layer[:6])


def gate_of(*layer: Any) -> tuple[Any, ...]:
    """The gate's numbers in the order of gate.apply_gate; one kernel is compiled for each gate."""
    _up, _up_bias, _down, _down_bias, gated, _interleaved, kind, *numbers = layer
    return kind, gated, *numbers


def kept_columns(call: Call) -> int:
    """Columns of a tensor that keeps the first product, or one half of it, as the weights' columns are stored."""
    return call.up[0].shape[1]


def halves(kept: Sequence[Tensor], order: str) -> tuple[Tensor | None, Tensor | None]:
    """Where gate and up columns begin in such tensors; None: together with the gate columns, or not at all."""
    if not kept or order in ("single", "interleaved"):
        return (kept[0] if kept else None), None
    return kept[0], (kept[1] if len(kept) > 1 else kept[0][:, kept[0].shape[1] // 2 :])


def _matrices(stored: list[Tensor], biases: list[Tensor], gated: bool, interleaved: bool) -> Matrices:
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
