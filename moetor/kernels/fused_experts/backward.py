"""The backward pass: group the pairs anew, go back through the second product and the gate, then each gradient.

What nobody wants is not computed: which launches there are follows from `Wanted`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..matmul import result_dtype
from . import gradients, table, tiles
from .descriptors import Blocks, blocks_of_matrices, blocks_of_product, blocks_of_rows
from .group import Grouping, plan_grouping
from .launcher import Launcher, Step
from .many_tokens import device_limits
from .operands import Call, halves, kept_columns
from .sizes import cdiv, next_power_of_2

_inner, _weights = Launcher(gradients.inner_gradient), Launcher(gradients.weight_gradient)
_sort, _biases, _routing = (
    Launcher(kernel) for kernel in (gradients.sort_rows, gradients.bias_gradient, gradients.routing_gradient)
)
_rows, _combine = Launcher(tiles.down_product), Launcher(tiles.combine)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients are wanted; `up` and `up_bias` for each of their tensors."""

    x: bool
    routing: bool
    up: tuple[bool, ...]
    down: bool
    up_bias: tuple[bool, ...]
    down_bias: bool

    @property
    def of_first(self) -> bool:
        """Whether any lies on the other side of the gate."""
        return self.x or any(self.up) or any(self.up_bias)

    @property
    def of_inner(self) -> bool:
        """Whether any needs the rows between the products."""
        return self.of_first or self.routing or self.down


@dataclass(slots=True)
class WeightGradient:
    """The gradient of one tensor of matrices.

    Attributes:
        blocks: of the rows on either side, for the copy engine; None: plain loads.
    """

    step: Step
    blocks: tuple[Blocks, Blocks] | None

    def launch(self, left: Any, right: Any, bounds: Any, out: Tensor | None) -> None:
        if self.blocks:
            left, right = self.blocks[0].of(left), self.blocks[1].of(right)
        self.step.launch(left, right, bounds, out)


@dataclass(slots=True)
class Backward:
    """The plan of a call.

    Attributes:
        outer, inner, first: shapes of rows of x, of inner rows, and of the gradient of a tensor of first products.
        num_dots: numbers that the routing weights' gradients are sums of.
        down_blocks: of the second matrices, in the first step.
        x_blocks: of the gradients of first products, and of the first matrices.
    """

    wanted: Wanted
    outer: tuple[int, int]
    inner: tuple[int, int]
    first: tuple[int, int]
    num_dots: int
    grouping: Grouping
    sort_grad: Step
    sort_x: Step
    back: Step
    down_blocks: Blocks | None
    of_routing: Step
    of_up: list[WeightGradient | None]
    of_down: WeightGradient | None
    of_up_bias: list[Step | None]
    of_down_bias: Step | None
    of_x: Step
    x_blocks: tuple[Blocks, Blocks] | None
    sum_x: Step

    @property
    def ready(self) -> bool:
        """Whether all that will be launched has been compiled."""
        return self.grouping.steps[-1].compiled is not None

    def run(self, call: Call, grad: Tensor, kept: Sequence[Tensor], to: Sequence[Tensor | None]) -> None:
        """Fill the gradients.

        Args:
            grad: (T, H) of the result, contiguous.
            kept: the first product, by pairs.
            to: of x, routing, each of up, down, each bias of up, and down's; None where none is wanted.
        """
        wanted, x = self.wanted, call.x
        to_x, to_routing = to[:2]
        to_up, to_down, to_up_bias, to_down_bias = _of_weights(call, to)
        _buffer, (pairs, list_of_tiles, bounds) = self.grouping.run(call.ids.view(-1))

        weighted = x.new_empty(self.inner) if wanted.down else None
        firsts = [x.new_empty(self.first) for _ in call.up] if wanted.of_first else []
        dots = x.new_empty(self.num_dots, dtype=torch.float32) if wanted.routing else None
        if wanted.of_inner:
            rows = x.new_empty(self.outer)
            self.sort_grad.launch(grad, pairs, list_of_tiles, rows)
            down: Any = self.down_blocks.of(call.down) if self.down_blocks else call.down
            self.back.launch(
                rows, pairs, list_of_tiles, down, call.routing, *halves(kept, call.order), weighted,
                *halves(firsts, call.order), dots,
            )  # fmt: skip
            if self.of_down is not None:
                self.of_down.launch(weighted, rows, bounds, to_down)
            del rows, weighted
        if to_routing is not None:
            self.of_routing.launch(dots, call.ids, grad, call.down_bias, to_routing)
        if self.of_down_bias is not None:
            self.of_down_bias.launch(grad, pairs, call.routing, bounds, to_down_bias)
        if any(wanted.up):
            rows = x.new_empty(self.outer)
            self.sort_x.launch(x, pairs, list_of_tiles, rows)
            for of_up, first, out in zip(self.of_up, firsts, to_up, strict=True):
                if of_up is not None:
                    of_up.launch(first, rows, bounds, out)
            del rows
        for of_bias, first, out in zip(self.of_up_bias, firsts, to_up_bias, strict=False):
            if of_bias is not None:
                of_bias.launch(first, None, None, bounds, out)
        if to_x is not None:
            self._launch_x(call, firsts, pairs, list_of_tiles, to_x)

    def _launch_x(self, call: Call, firsts: list[Tensor], pairs: Any, list_of_tiles: Any, out: Tensor) -> None:
        x, apart = call.x, len(firsts) > 1
        rows = torch.empty((call.ids.numel(), x.shape[1]), dtype=result_dtype(x.dtype), device=x.device)
        from_rows: list[Any] = list(firsts)
        matrices: list[Any] = list(call.up)
        if self.x_blocks:
            from_rows = [self.x_blocks[0].of(first) for first in firsts]
            matrices = [self.x_blocks[1].of(up) for up in call.up]
        self.of_x.launch(
            from_rows[0], from_rows[1] if apart else None, pairs, list_of_tiles,
            matrices[0], matrices[1] if apart else None, None, None, rows,
        )  # fmt: skip
        self.sum_x.launch(rows, call.ids, out)


def plan_backward(
    call: Call, gate: tuple[Any, ...], tf32: bool, wanted: Wanted, to: Sequence[Tensor | None]
) -> Backward:
    x, down, up = call.x, call.down, call.up
    (T, H), K, (E, _, I), N = x.shape, call.ids.shape[1], down.shape, kept_columns(call)
    S, device = T * K, x.device.index
    num_processors, shared_limit = device_limits(device) if x.is_cuda else (1, 2**20)
    back, of_x, of_weight = table.backward_tiles(S, E, x.dtype, shared_limit)
    pad = table.row_multiple(back)
    grouping = plan_grouping(S, E, back.BM, device, pad)
    most_tiles, most_rows = grouping.most_tiles, grouping.most_rows
    precision = "tf32" if tf32 else "ieee"

    # the second matrices from the other side: their columns are the depth
    outer, along, across = down.stride()
    down_blocks = blocks_of_matrices(down, (E, I, H), (outer, across, along), back) if back.tma else None
    blocks = cdiv(I, back.BN)
    back_step = Step(
        _inner, (most_tiles * blocks, 1, 1), (most_tiles, H, I, S, N, outer, across, along),
        (back.BM, back.BN, back.BK, pad, back.group, back.halve, call.order == "interleaved", H % back.BK == 0,
         I % back.BN == 0, precision, down_blocks is not None, along == 1, *gate),
        back.warps, back.stages, device,
    )  # fmt: skip

    def sort(source_strides: tuple[int, ...]) -> Step:
        block = min(512, next_power_of_2(H))
        grid = (most_tiles * (back.BM // 16), cdiv(H, block), 1)
        return Step(_sort, grid, (most_tiles, H, K, *source_strides), (back.BM, pad, 16, block), 4, 3, device)

    def of_matrices(columns: int, out: Tensor, out_strides: tuple[int, ...]) -> WeightGradient:
        left = blocks_of_rows(out, most_rows, columns, of_weight.BK, of_weight.BM) if of_weight.tma else None
        right = blocks_of_rows(out, most_rows, H, of_weight.BK, of_weight.BN)
        copies = (left, right) if left and right else None
        step = Step(
            _weights, (E * cdiv(columns, of_weight.BM) * cdiv(H, of_weight.BN), 1, 1), (columns, H, *out_strides),
            (of_weight.BM, of_weight.BN, of_weight.BK, columns % of_weight.BM == 0, H % of_weight.BN == 0, precision,
             copies is not None), of_weight.warps, of_weight.stages, device,
        )  # fmt: skip
        return WeightGradient(step, copies)

    def of_bias(columns: int, out: Tensor, gather: bool) -> Step:
        block = min(128, max(16, next_power_of_2(columns)))
        constants = (block, 32, gather)
        return Step(_biases, (cdiv(columns, block), E, 1), (columns, K, *out.stride()), constants, 4, 3, device)

    to_up, to_down, to_up_bias, to_down_bias = _of_weights(call, to)
    num_up = len(up)
    outer, row, column = up[0].stride()
    x_blocks = blocks_of_product(up[0], (E, H, N), (outer, column, row), most_rows, of_x) if of_x.tma else None
    if x_blocks and num_up > 1 and up[1].data_ptr() % 16:
        x_blocks = None
    most = most_tiles * cdiv(H, of_x.BN)
    bias_strides = call.down_bias.stride() if call.down_bias is not None else (0, 0)
    block = min(1024, next_power_of_2(H))
    return Backward(
        wanted=wanted,
        outer=(most_rows, H),
        inner=(most_rows, I),
        first=(most_rows, N),
        num_dots=blocks * S,
        grouping=grouping,
        sort_grad=sort((H, 1)),
        sort_x=sort(x.stride()),
        back=back_step,
        down_blocks=down_blocks,
        of_routing=Step(
            _routing, (cdiv(S, 64), 1, 1), (S, E, H, K, blocks, *bias_strides), (64, 64), 4, 3, device
        ),
        of_up=[None if out is None else of_matrices(N, out, out.stride()) for out in to_up],
        of_down=None if to_down is None else of_matrices(I, to_down, _turned(to_down.stride())),
        of_up_bias=[None if out is None else of_bias(N, out, False) for out in to_up_bias],
        of_down_bias=None if to_down_bias is None else of_bias(H, to_down_bias, True),
        of_x=Step(
            _rows, (min(most, num_processors) if x_blocks else most, 1, 1),
            (most_tiles, H, N, outer, column, row, 0, 0),
            (of_x.BM, of_x.BN, of_x.BK, of_x.group, False, N % of_x.BK == 0, H % of_x.BN == 0, precision,
             x_blocks is not None, row == 1), of_x.warps, of_x.stages, device,
        ),
        x_blocks=x_blocks,
        sum_x=Step(_combine, (T, cdiv(H, block), 1), (E, H), (K, block), 4, 3, device),
    )  # fmt: skip


def _of_weights(
    call: Call, to: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor | None], Tensor | None, Sequence[Tensor | None], Tensor | None]:
    """Gradients of up, down, and their biases, out of all."""
    down = 2 + len(call.up)
    return to[2:down], to[down], to[down + 1 : -1], to[-1]


def _turned(strides: tuple[int, ...]) -> tuple[int, ...]:
    outer, row, column = strides
    return outer, column, row
