"""The layer for more tokens: group the pairs, two products over tiles of rows, add."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..matmul import result_dtype
from . import table, tiles
from .group import group_pairs
from .launcher import Launcher
from .operands import Matrices

_up_product, _down_product = Launcher(tiles.up_product), Launcher(tiles.down_product)
_combine = Launcher(tiles.combine)


def many_tokens(
    x: Tensor, ids: Tensor, routing: Tensor, up: Matrices, down: Matrices, out: Tensor, gate: tuple[Any, ...],
    wide: bool,
) -> None:  # fmt: skip
    (T, H), K, E, I = x.shape, ids.shape[1], up.first.shape[0], up.N
    S, device = T * K, x.device.index
    pairs, ends = group_pairs(ids.view(-1), E)
    first, second = table.tiles(S, E, x.dtype, _shared_limit(device) if x.is_cuda else 2**20)
    inner = torch.empty(S, I, dtype=x.dtype, device=x.device)
    rows = torch.empty(S, H, dtype=result_dtype(x.dtype), device=x.device)
    # one size for most models, so that they share compiled kernels
    experts = max(128, triton.next_power_of_2(E))
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    precision = "tf32" if tf32 else "ieee"

    # Where gate and up columns lie side by side, one wide accumulator reads both as they are stored.
    N, strides, bias_strides = I, up.strides, up.bias_strides
    if wide:
        N, strides, bias_strides = 2 * I, (strides[0], up.offset, strides[2]), (bias_strides[0], up.bias_offset)
    tma = first.tma and _takes_tma(up.first, strides) and _takes_tma(up.second, (*strides[:2], up.offset or 8))
    p_gate, p_up = up.first, up.second
    if tma:
        width = first.BN * (1 + wide)
        p_gate = _descriptor(up.first, 0, (E, N, H), strides, width, first.BK)
        p_up = p_gate if wide else _descriptor(up.second, up.offset, (E, N, H), strides, width, first.BK)
    tiles_M = triton.cdiv(S, first.BM) + min(E, S)
    _up_product(
        (tiles_M * triton.cdiv(I, first.BN), 1, 1),
        (x, pairs, ends, p_gate, p_up, up.bias_first, up.bias_second, inner, tiles_M, E, H, I, K, *x.stride(),
         *strides, up.offset, *bias_strides, up.bias_offset),
        (experts, first.BM, first.BN, first.BK, first.group, wide, up.bias_first is not None, H % first.BK == 0,
         I % first.BN == 0, precision, tma, strides[2] == 1, *gate),
        first.warps, first.stages, device,
    )  # fmt: skip

    tma = second.tma and _takes_tma(down.first, down.strides) and I * x.element_size() % 16 == 0
    p_inner, p_down = inner, down.first
    if tma:
        p_inner = TensorDescriptor(inner, [S, I], [I, 1], [second.BM, second.BK])
        p_down = _descriptor(down.first, 0, (E, H, I), down.strides, second.BN, second.BK)
    tiles_M = triton.cdiv(S, second.BM) + min(E, S)
    _down_product(
        (tiles_M * triton.cdiv(H, second.BN), 1, 1),
        (p_inner, pairs, ends, p_down, down.bias_first, routing, rows, tiles_M, E, H, I, *down.strides,
         *down.bias_strides),
        (experts, second.BM, second.BN, second.BK, second.group, down.bias_first is not None, I % second.BK == 0,
         H % second.BN == 0, precision, tma, down.strides[2] == 1),
        second.warps, second.stages, device,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(H))
    _combine((T, triton.cdiv(H, block), 1), (rows, ids, out, E, H), (K, block), 4, 3, device)


def _takes_tma(tensor: Tensor, strides: tuple[int, int, int]) -> bool:
    """Whether the copy engine of SM90 and newer can read it: one stride of 1, all else on 16 bytes."""
    size = tensor.element_size()
    if 1 not in strides[1:]:
        return False
    on_16_bytes = all(stride == 1 or stride * size % 16 == 0 for stride in strides)
    return tensor.is_cuda and _has_tma(tensor.device.index) and on_16_bytes and tensor.data_ptr() % 16 == 0


def _descriptor(
    tensor: Tensor, offset: int, shape: tuple[int, int, int], strides: tuple[int, int, int], columns: int, depth: int
) -> TensorDescriptor:
    """Blocks of `columns` by `depth` of each matrix, in the order of storage."""
    view = torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)
    if strides[2] == 1:
        return TensorDescriptor(view, list(shape), list(strides), [1, columns, depth])
    E, N, K = shape
    outer, column, along = strides
    return TensorDescriptor(view, [E, K, N], [outer, along, column], [1, depth, columns])


@functools.cache
def _has_tma(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _shared_limit(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
