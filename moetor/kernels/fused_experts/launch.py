"""From tensors to launches: which path, which tile, which addresses."""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.activation import Activation
from ..library import define
from ..matmul import result_dtype
from . import few, table, tiles
from .group import group_pairs
from .launcher import Launcher

_up_vector, _down_vector = Launcher(few.up_vector), Launcher(few.down_vector)
_up_product, _down_product = Launcher(tiles.up_product), Launcher(tiles.down_product)
_combine = Launcher(tiles.combine)


def fused_experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    routing_TK: Tensor,
    up: list[Tensor],
    up_bias: list[Tensor],
    down: Tensor,
    down_bias: Tensor | None,
    activation: Activation,
    gated: bool,
    interleaved: bool,
) -> Tensor:
    """The layer's result (T, H) in the dtype of x.

    Args:
        x_TH: (T, H) bfloat16, float16 or float32.
        ids_TK, routing_TK: (T, K) ids of experts (others add nothing) and float weights.
        up: (E, 2I, H) in one tensor, gate rows first or interleaved; gate and up (E, I, H) apart,
            of the same strides; or (E, I, H) when not gated. Views of any strides.
        up_bias: (E, N) for each of them, or none.
        down, down_bias: (E, H, I) likewise, and (E, H) or None.
    """
    a = activation
    # the operator is for tracing: its own way costs 13 µs for so many arguments
    run = torch.ops.moetor.fused_experts if torch.compiler.is_compiling() else _fused_experts
    out: Tensor = run(
        x_TH, ids_TK, routing_TK, up, up_bias, down, down_bias, gated, interleaved,
        a.kind, a.alpha, a.limit, a.limit_after, a.up_offset, a.gate_softcap, a.up_softcap,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Matrices:
    """One product's matrices as a kernel sees them: where column n of expert e begins, and for gate and up.

    Attributes:
        first, second: tensors that hold gate and up; the same one unless they are stored apart.
        N, K: columns of one of them, and depth.
        strides: from expert to expert, column to column, along the depth.
        offset: elements from a gate column to its up column, in `second`.
        bias_*: the same for the biases.
    """

    first: Tensor
    second: Tensor
    N: int
    K: int
    strides: tuple[int, int, int]
    offset: int
    bias_first: Tensor | None
    bias_second: Tensor | None
    bias_strides: tuple[int, int]
    bias_offset: int


def _matrices(stored: list[Tensor], biases: list[Tensor], gated: bool, interleaved: bool) -> _Matrices:
    whole, second = stored[0], stored[-1]
    _, N, K = whole.shape
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
    return _Matrices(
        whole, second, N, K, strides, offset, bias, biases[-1] if biases else None, bias_strides, bias_offset
    )


def _fused_experts(
    x: Tensor, ids: Tensor, routing: Tensor, up: list[Tensor], up_bias: list[Tensor], down: Tensor,
    down_bias: Tensor | None, gated: bool, interleaved: bool, kind: str, alpha: float, limit: float | None,
    limit_after: bool, up_offset: float, gate_softcap: float | None, up_softcap: float | None,
) -> Tensor:  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    # in the order of gate.apply_gate; one kernel is compiled for each gate
    gate = (kind, gated, alpha, limit, limit_after, up_offset, gate_softcap, up_softcap)
    first = _matrices(up, up_bias, gated, interleaved)
    second = _matrices([down], [] if down_bias is None else [down_bias], False, False)
    call = (x, ids.contiguous(), routing.contiguous(), first, second, out, gate)
    with _on(x):
        if x.shape[0] <= table.FEW_TOKENS:
            _few(*call)
        else:
            _tiles(*call, wide=gated and interleaved)
    return out


def _few(
    x: Tensor, ids: Tensor, routing: Tensor, up: _Matrices, down: _Matrices, out: Tensor, gate: tuple[Any, ...]
) -> None:
    (T, H), K, E, I = x.shape, ids.shape[1], up.first.shape[0], up.N
    device = x.device.index
    inner = torch.empty(T * K, I, dtype=x.dtype, device=x.device)
    tile = table.up_vector(T, up.strides[2] == 1)
    _up_vector(
        (triton.cdiv(I, tile.BN), T * K, 1),
        (x, ids, up.first, up.second, up.bias_first, up.bias_second, inner, E, H, I, K, *x.stride(),
         *up.strides, up.offset, *up.bias_strides, up.bias_offset),
        (tile.BN, tile.BK, tile.stages, up.bias_first is not None, H % tile.BK == 0, *gate),
        tile.warps, 3, device,
    )  # fmt: skip
    tile = table.down_vector(T, down.strides[2] == 1)
    _down_vector(
        (triton.cdiv(H, tile.BN), T, 1),
        (inner, ids, down.first, down.bias_first, routing, out, E, H, I, *down.strides, *down.bias_strides),
        (K, tile.BN, tile.BK, tile.stages, down.bias_first is not None, I % tile.BK == 0),
        tile.warps, 3, device,
    )  # fmt: skip


def _tiles(
    x: Tensor, ids: Tensor, routing: Tensor, up: _Matrices, down: _Matrices, out: Tensor, gate: tuple[Any, ...],
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
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"

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


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the tensors' own device."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else nullcontext()


define(
    "fused_experts(Tensor x, Tensor ids, Tensor routing, Tensor[] up, Tensor[] up_bias, Tensor down,"
    " Tensor? down_bias, bool gated, bool interleaved, str kind, float alpha, float? limit, bool limit_after,"
    " float up_offset, float? gate_softcap, float? up_softcap) -> Tensor",
    _fused_experts,
    lambda x, *_: x.new_empty(x.shape),
)
