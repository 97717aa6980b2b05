"""From tensors to launches."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.activation import Activation
from ..library import define
from ..matmul import result_dtype
from . import table
from .few import down_vector, up_vector
from .gate import gate_options
from .group import group_pairs
from .tiles import combine, down_product, up_product


def fused_experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    routing_TK: Tensor,
    up: tuple[Tensor, ...],
    up_bias: tuple[Tensor, ...] | None,
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
        down: (E, H, I) likewise; biases (E, N).
    """
    a = activation
    out: Tensor = torch.ops.moetor.fused_experts(
        x_TH, ids_TK, routing_TK, list(up), list(up_bias or ()), down, down_bias, gated, interleaved,
        a.kind, a.alpha, a.limit, a.limit_after, a.up_offset, a.gate_softcap, a.up_softcap,
    )  # fmt: skip
    return out


def _fused_experts(
    x: Tensor, ids: Tensor, routing: Tensor, up: list[Tensor], up_bias: list[Tensor], down: Tensor,
    down_bias: Tensor | None, gated: bool, interleaved: bool, kind: str, alpha: float, limit: float | None,
    limit_after: bool, up_offset: float, gate_softcap: float | None, up_softcap: float | None,
) -> Tensor:  # fmt: skip
    (T, H), K = x.shape, ids.shape[1]
    out = torch.empty(T, H, dtype=x.dtype, device=x.device)
    if not T:
        return out
    activation = Activation(kind, alpha, limit, limit_after, up_offset, gate_softcap, up_softcap)
    options = gate_options(activation, gated)
    ids, routing = ids.contiguous(), routing.contiguous()
    gate, second = _halves(up, gated, interleaved)
    gate_bias, second_bias = _halves(up_bias, gated, interleaved) if up_bias else (None, None)
    few = T <= table.FEW_TOKENS
    with _on(x):
        if few:
            _few(x, ids, routing, gate, second, gate_bias, second_bias, down, down_bias, out, options)
        else:
            wide = interleaved and gated
            _tiles(x, ids, routing, gate, second, gate_bias, second_bias, down, down_bias, out, options, wide)
    return out


def _halves(stored: list[Tensor], gated: bool, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate rows and up rows as views of the same strides; twice the same where there is no gate."""
    if len(stored) == 2:
        return stored[0], stored[1]
    (whole,) = stored
    if not gated:
        return whole, whole
    if interleaved:
        return whole[:, 0::2], whole[:, 1::2]
    inner = whole.shape[1] // 2
    return whole[:, :inner], whole[:, inner:]


def _few(
    x: Tensor, ids: Tensor, routing: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, out: Tensor, options: dict[str, Any],
) -> None:  # fmt: skip
    (T, H), K, (E, I, _) = x.shape, ids.shape[1], gate.shape
    first = table.up_vector(T, gate.stride(2) == 1)
    second = table.down_vector(T, down.stride(2) == 1)
    inner = torch.empty(T * K, I, dtype=x.dtype, device=x.device)
    up_vector[(triton.cdiv(I, first.BN), T * K)](
        x, ids, gate, up, gate_bias, up_bias, inner, E, H, I, K,
        *x.stride(), *gate.stride(), *(gate_bias.stride() if gate_bias is not None else (0, 0)),
        BN=first.BN, BK=first.BK, STAGES=first.stages, HAS_BIAS=gate_bias is not None, EVEN_K=H % first.BK == 0,
        num_warps=first.warps, **options,
    )  # fmt: skip
    down_vector[(triton.cdiv(H, second.BN), T)](
        inner, ids, down, down_bias, routing, out, E, H, I,
        *down.stride(), *(down_bias.stride() if down_bias is not None else (0, 0)),
        TOP_K=K, BN=second.BN, BK=second.BK, STAGES=second.stages, HAS_BIAS=down_bias is not None,
        EVEN_K=I % second.BK == 0, num_warps=second.warps,
    )  # fmt: skip


def _tiles(
    x: Tensor, ids: Tensor, routing: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, out: Tensor, options: dict[str, Any], wide: bool,
) -> None:  # fmt: skip
    (T, H), K, (E, I, _) = x.shape, ids.shape[1], gate.shape
    S = T * K
    pairs, ends = group_pairs(ids.view(-1), E)
    first, second = table.tiles(S, E, x.dtype, _shared_limit(x.device.index) if x.is_cuda else 2**20)
    inner = torch.empty(S, I, dtype=x.dtype, device=x.device)
    rows = torch.empty(S, H, dtype=result_dtype(x.dtype), device=x.device)
    # one size for most models, so that they share compiled kernels
    experts = max(128, triton.next_power_of_2(E))
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    # the wide accumulator reads gate and up columns as they are stored, side by side
    _, row_stride, _ = gate.stride()
    n_stride = row_stride // 2 if wide else row_stride
    bias_strides = (0, 0) if gate_bias is None else gate_bias.stride()
    if wide:
        bias_strides = (bias_strides[0], bias_strides[1] // 2)
    tiles = triton.cdiv(S, first.BM) + min(E, S)
    whole = torch.as_strided(gate, (E, 2 * I, H), (gate.stride(0), n_stride, gate.stride(2))) if wide else gate
    tma = first.tma and takes_tma(whole) and takes_tma(up)
    up_product[(tiles * triton.cdiv(I, first.BN),)](
        x, pairs, ends,
        descriptor(whole, first.BN * (1 + wide), first.BK) if tma else gate,
        descriptor(up, first.BN, first.BK) if tma and not wide else up,
        gate_bias, up_bias, inner, tiles, E, H, I, K,
        *x.stride(), gate.stride(0), n_stride, gate.stride(2), *bias_strides,
        EXPERTS=experts, BM=first.BM, BN=first.BN, BK=first.BK, GROUP=first.group, WIDE=wide,
        HAS_BIAS=gate_bias is not None, EVEN_K=H % first.BK == 0, EVEN_N=I % first.BN == 0, PRECISION=precision,
        TMA=tma, BY_ROWS=gate.stride(2) == 1,
        num_warps=first.warps, num_stages=first.stages, **options,
    )  # fmt: skip
    tiles = triton.cdiv(S, second.BM) + min(E, S)
    tma = second.tma and takes_tma(down) and takes_tma(inner[None])
    down_product[(tiles * triton.cdiv(H, second.BN),)](
        TensorDescriptor(inner, inner.shape, inner.stride(), [second.BM, second.BK]) if tma else inner,
        pairs, ends, descriptor(down, second.BN, second.BK) if tma else down,
        down_bias, routing, rows, tiles, E, H, I,
        *down.stride(), *((0, 0) if down_bias is None else down_bias.stride()),
        EXPERTS=experts, BM=second.BM, BN=second.BN, BK=second.BK, GROUP=second.group,
        HAS_BIAS=down_bias is not None, EVEN_K=I % second.BK == 0, EVEN_N=H % second.BN == 0, PRECISION=precision,
        TMA=tma, BY_ROWS=down.stride(2) == 1,
        num_warps=second.warps, num_stages=second.stages,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(H))
    combine[(T, triton.cdiv(H, block))](rows, ids, out, E, H, TOP_K=K, BLOCK=block)


def takes_tma(w_ENK: Tensor) -> bool:
    """Whether the copy engine of SM90 and newer can read blocks of these matrices: 16-byte strides and start."""
    outer, rows, columns = w_ENK.stride()
    leading = rows if columns == 1 else columns if rows == 1 else 1
    aligned = leading * w_ENK.element_size() % 16 == 0 and outer * w_ENK.element_size() % 16 == 0
    return w_ENK.is_cuda and _has_tma(w_ENK.device.index) and aligned and w_ENK.data_ptr() % 16 == 0


def descriptor(w_ENK: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of blocks of `rows` by `columns` of each matrix, in the order of storage."""
    if w_ENK.stride(2) == 1:
        return TensorDescriptor(w_ENK, list(w_ENK.shape), list(w_ENK.stride()), [1, rows, columns])
    turned = w_ENK.transpose(1, 2)
    return TensorDescriptor(turned, list(turned.shape), list(turned.stride()), [1, columns, rows])


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
