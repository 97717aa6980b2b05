"""The layer for more tokens: group the pairs, two products over tiles of rows, add."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..matmul import result_dtype
from . import table, tiles
from .descriptors import describe_down, describe_up
from .group import group_pairs
from .launcher import Launcher
from .operands import Matrices
from .sizes import cdiv, next_power_of_2

_up_product, _down_product = Launcher(tiles.up_product), Launcher(tiles.down_product)
_combine = Launcher(tiles.combine)


def many_tokens(
    x: Tensor, ids: Tensor, routing: Tensor, up: Matrices, down: Matrices, out: Tensor, gate: tuple[Any, ...],
    order: str,
) -> None:  # fmt: skip
    """Fill out (T, H).

    Args:
        order: how gate and up columns lie: "stacked" or "interleaved" in one tensor, "apart" in two,
            or "single" without a gate.
    """
    (T, H), K, E, I = x.shape, ids.shape[1], up.first.shape[0], up.N
    S, device = T * K, x.device.index
    num_processors, shared_limit = _device(device) if x.is_cuda else (1, 2**20)
    first, second = table.tiles(S, E, x.dtype, shared_limit)
    inner = torch.empty(S, I, dtype=x.dtype, device=x.device)
    rows = torch.empty(S, H, dtype=result_dtype(x.dtype), device=x.device)
    pairs, ends, list_of_tiles, most_tiles = group_pairs(ids.view(-1), E, first.BM)
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    precision = "tf32" if tf32 else "ieee"

    p_gate: Any = up.first
    p_up: Any = up.second
    blocks = describe_up(up, order, first) if first.tma else None
    if blocks:
        order, p_gate, p_up = blocks
    _up_product(
        (most_tiles * cdiv(I, first.BN), 1, 1),
        (x, pairs, ends, list_of_tiles, p_gate, p_up, up.bias_first, up.bias_second, inner, most_tiles, H, I, K,
         *x.stride(), *up.strides, up.offset, *up.bias_strides, up.bias_offset),
        (first.BM, first.BN, first.BK, first.group, first.halve, order, up.bias_first is not None, H % first.BK == 0,
         I % first.BN == 0, precision, blocks is not None, up.strides[2] == 1, *gate),
        first.warps, first.stages, device,
    )  # fmt: skip

    p_inner: Any = inner
    p_down: Any = down.first
    copies = describe_down(inner, down, second) if second.tma else None
    if copies:
        p_inner, p_down = copies
    most = most_tiles * cdiv(H, second.BN)
    _down_product(
        (min(most, num_processors) if copies else most, 1, 1),
        (p_inner, pairs, ends, list_of_tiles, p_down, down.bias_first, routing, rows, most_tiles, H, I, *down.strides,
         *down.bias_strides),
        (second.BM, second.BN, second.BK, second.group, down.bias_first is not None, I % second.BK == 0,
         H % second.BN == 0, precision, copies is not None, down.strides[2] == 1),
        second.warps, second.stages, device,
    )  # fmt: skip
    block = min(1024, next_power_of_2(H))
    _combine((T, cdiv(H, block), 1), (rows, ids, out, E, H), (K, block), 4, 3, device)


@functools.cache
def _device(device: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(properties.shared_memory_per_block_optin)
