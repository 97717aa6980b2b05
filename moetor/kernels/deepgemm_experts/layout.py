"""Where each pair's row lies among the padded ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..fused_experts.group import Grouping, plan_grouping
from ..fused_experts.launcher import Launcher
from . import around

_place = Launcher(around.place)

# The plans of grouping, by all that they depend on; see fused_experts.op.
_PLANS: dict[tuple[Any, ...], Grouping] = {}
_MOST_PLANS = 4096


@dataclass(frozen=True, slots=True)
class Padded:
    """The order of one call.

    Attributes:
        row_S: (S,) int32, the padded row of each pair; not written for pairs of no expert.
        layout_M: (M,) int32, the expert of each padded row, -1 for nobody's: what DeepGEMM reads on SM90.
        tiles: int32, each expert's rows in tiles of `alignment`: see `fused_experts.group.Grouping`.
        most_tiles: M / alignment.

    With ids [1, 0, 1] and an alignment of 2: rows [2, 0, 3], layout [0, -1, 1, 1, -1, …].
    """

    row_S: Tensor
    layout_M: Tensor
    tiles: Tensor
    most_tiles: int
    alignment: int

    @property
    def num_rows(self) -> int:
        return self.most_tiles * self.alignment


def pad_by_expert(ids_TK: Tensor, num_experts: int, alignment: int) -> Padded:
    """Group the pairs by expert, each expert's rows from a multiple of `alignment` on; no host sync."""
    ids, device = ids_TK.reshape(-1), ids_TK.device.index or 0
    key = (ids.shape[0], num_experts, alignment, device, ids.dtype, ids.data_ptr() % 16)
    plan = _PLANS.get(key) or plan_grouping(ids.shape[0], num_experts, alignment, device)
    buffer, _ = plan.run(ids)
    if plan.steps[-1].compiled is not None:  # only now: another thread may look
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan
    most_tiles, tiles = plan.most_tiles, buffer[plan.starts[1] :]
    row_S = torch.empty_like(ids, dtype=torch.int32)
    layout_M = torch.empty(most_tiles * alignment, dtype=torch.int32, device=ids.device)
    _place.launch((most_tiles, 1, 1), (buffer, tiles, row_S, layout_M, most_tiles), (alignment,), 4, 3, device)
    return Padded(row_S, layout_M, tiles, most_tiles, alignment)
