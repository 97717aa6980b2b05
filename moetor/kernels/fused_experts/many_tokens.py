"""The layer for more tokens: group the pairs, two products over tiles of rows, add."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..matmul import result_dtype
from . import table, tiles
from .descriptors import Blocks, blocks_of_product, blocks_of_up
from .group import Grouping, plan_grouping
from .launcher import Launcher, Step
from .operands import Call, halves, kept_columns
from .sizes import cdiv, next_power_of_2

_up_product, _down_product = Launcher(tiles.up_product), Launcher(tiles.down_product)
_combine = Launcher(tiles.combine)


@dataclass(slots=True)
class ManyTokens:
    """The plan of a call.

    Attributes:
        inner, rows: shapes of what lies between the products, and between them and the sum.
        up_blocks: of gate and up, for the copy engine; None: plain loads.
        down_blocks: of inner and down.
    """

    inner: tuple[int, int]
    rows: tuple[int, int]
    grouping: Grouping
    first: Step
    up_blocks: tuple[Blocks, Blocks] | None
    second: Step
    down_blocks: tuple[Blocks, Blocks] | None
    last: Step

    @property
    def ready(self) -> bool:
        return self.last.compiled is not None

    def run(self, call: Call, out: Tensor, kept: Sequence[Tensor] = ()) -> None:
        """Write the result and, where there is room to keep it, the first product."""
        x = call.x
        _buffer, (pairs, list_of_tiles, _bounds) = self.grouping.run(call.ids.view(-1))
        inner = torch.empty(self.inner, dtype=x.dtype, device=x.device)
        gate: Any = call.up[0]
        up: Any = call.up[-1]
        if self.up_blocks:
            gate = self.up_blocks[0].of(gate)
            up = gate if self.up_blocks[0] is self.up_blocks[1] else self.up_blocks[1].of(up)
        bias, second_bias = (call.up_bias[0], call.up_bias[-1]) if call.up_bias else (None, None)
        first, second = halves(kept, call.order)
        self.first.launch(x, pairs, list_of_tiles, gate, up, bias, second_bias, inner, first, second)

        rows = torch.empty(self.rows, dtype=result_dtype(x.dtype), device=x.device)
        p_inner: Any = inner
        down: Any = call.down
        if self.down_blocks:
            p_inner, down = self.down_blocks[0].of(inner), self.down_blocks[1].of(down)
        self.second.launch(p_inner, None, pairs, list_of_tiles, down, None, call.down_bias, call.routing, rows)
        self.last.launch(rows, call.ids, out)


def plan_many_tokens(call: Call, gate: tuple[Any, ...], tf32: bool) -> ManyTokens:
    x, up, down, order = call.x, call.first(), call.second(), call.order
    (T, H), K, E, I = x.shape, call.ids.shape[1], up.first.shape[0], up.N
    S, device = T * K, x.device.index
    num_processors, shared_limit = device_limits(device) if x.is_cuda else (1, 2**20)
    first, second = table.tiles(S, E, x.dtype, shared_limit)
    grouping = plan_grouping(S, E, first.BM, device)
    most_tiles = grouping.most_tiles
    precision = "tf32" if tf32 else "ieee"

    blocks = blocks_of_up(up, order, first) if first.tma else None
    order = blocks[0] if blocks else order
    up_step = Step(
        _up_product, (most_tiles * cdiv(I, first.BN), 1, 1),
        (most_tiles, H, I, K, *x.stride(), *up.strides, up.offset, *up.bias_strides, up.bias_offset,
         kept_columns(call)),
        (first.BM, first.BN, first.BK, first.group, first.halve, order, up.bias_first is not None, H % first.BK == 0,
         I % first.BN == 0, precision, blocks is not None, up.strides[2] == 1, *gate),
        first.warps, first.stages, device,
    )  # fmt: skip
    copies = blocks_of_product(call.down, (E, H, I), down.strides, S, second) if second.tma else None
    most = most_tiles * cdiv(H, second.BN)
    down_step = Step(
        _down_product, (min(most, num_processors) if copies else most, 1, 1),
        (most_tiles, H, I, *down.strides, *down.bias_strides),
        (second.BM, second.BN, second.BK, second.group, down.bias_first is not None, I % second.BK == 0,
         H % second.BN == 0, precision, copies is not None, down.strides[2] == 1),
        second.warps, second.stages, device,
    )  # fmt: skip
    block = min(1024, next_power_of_2(H))
    return ManyTokens(
        inner=(S, I),
        rows=(S, H),
        grouping=grouping,
        first=up_step,
        up_blocks=blocks[1:] if blocks else None,
        second=down_step,
        down_blocks=copies,
        last=Step(_combine, (T, cdiv(H, block), 1), (E, H), (K, block), 4, 3, device),
    )


@functools.cache
def device_limits(device: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(properties.shared_memory_per_block_optin)
