"""The layer for a few tokens: two launches; three where the columns of the second product are contiguous."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..matmul import result_dtype
from . import table, tiles, vectors
from .launcher import Launcher, Step
from .operands import Call
from .sizes import cdiv, next_power_of_2

_up_vector, _down_vector = Launcher(vectors.up_vector), Launcher(vectors.down_vector)
_combine = Launcher(tiles.combine)


@dataclass(slots=True)
class FewTokens:
    """The plan of a call: two matrix-vector products.

    Attributes:
        inner: shape of what lies between them.
        rows, last: where each pair's row is written by itself, their shape and their sum; None: the
            second product adds a token's rows.
    """

    inner: tuple[int, int]
    first: Step
    second: Step
    rows: tuple[int, int] | None = None
    last: Step | None = None

    @property
    def ready(self) -> bool:
        return (self.last or self.second).compiled is not None

    def run(self, call: Call, out: Tensor) -> None:
        x, ids = call.x, call.ids
        inner = torch.empty(self.inner, dtype=x.dtype, device=x.device)
        bias, second_bias = (call.up_bias[0], call.up_bias[-1]) if call.up_bias else (None, None)
        self.first.launch(x, ids, call.up[0], call.up[-1], bias, second_bias, inner)
        if self.rows is None or self.last is None:
            self.second.launch(inner, ids, call.down, call.down_bias, call.routing, out)
            return
        rows = torch.empty(self.rows, dtype=result_dtype(x.dtype), device=x.device)
        self.second.launch(inner, ids, call.down, call.down_bias, call.routing, rows)
        self.last.launch(rows, ids, out)


def plan_few_tokens(call: Call, gate: tuple[Any, ...]) -> FewTokens:
    (T, H), K, E, device = call.x.shape, call.ids.shape[1], call.up[0].shape[0], call.x.device.index
    up, down = call.first(), call.second()
    first = table.up_vector(T, call.up[0].stride(2) == 1)
    second = table.down_vector(T, call.down.stride(2) == 1)
    # one program a token and block of columns, or one a pair
    programs, slots = (T * K, 1) if second.by_pair else (T, K)
    block = min(1024, next_power_of_2(H))
    return FewTokens(
        inner=(T * K, up.N),
        first=Step(
            _up_vector, (cdiv(up.N, first.BN), T * K, 1),
            (E, H, up.N, K, *call.x.stride(), *up.strides, up.offset, *up.bias_strides, up.bias_offset),
            (first.BN, first.BK, first.stages, call.order == "interleaved", bool(call.up_bias), H % first.BK == 0,
             *gate), first.warps, 3, device,
        ),
        second=Step(
            _down_vector, (cdiv(H, second.BN), programs, 1), (E, H, up.N, *down.strides, *down.bias_strides),
            (slots, second.BN, second.BK, second.stages, call.down_bias is not None, up.N % second.BK == 0),
            second.warps, 3, device,
        ),
        rows=(T * K, H) if second.by_pair else None,
        last=Step(_combine, (T, cdiv(H, block), 1), (E, H), (K, block), 4, 3, device) if second.by_pair else None,
    )  # fmt: skip
