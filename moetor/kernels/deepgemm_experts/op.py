"""The layer as a function and as an operator: pad, product, gate, product, sum."""

from typing import Any

import torch
from torch import Tensor

from ...core.activation import Activation
from ..external.packages import loaded
from ..external.requirements import DEEP_GEMM
from ..fused_experts.launcher import Launcher
from ..fused_experts.sizes import cdiv, next_power_of_2
from ..library import define, needs_operator
from . import around
from .layout import Padded, pad_by_expert

_spread, _spread_quantized = Launcher(around.spread), Launcher(around.spread_quantized)
_gate, _gate_quantized = Launcher(around.gate_rows), Launcher(around.gate_rows_quantized)
_combine = Launcher(around.combine)

_FP8 = torch.float8_e4m3fn
# Columns of one scale, of activations.
GROUP = 128


def deepgemm_experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    routing_TK: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
    gated: bool,
    interleaved: bool,
) -> Tensor:
    """The layer's result (T, H) in the dtype of x.

    Args:
        x_TH: (T, H) bfloat16.
        ids_TK, routing_TK: (T, K) ids of experts (others add nothing) and float weights.
        up, down: (E, N, H) and (E, H, I), whole stacks: bfloat16 with one stride of 1, or rows of e4m3 or e2m1.
        up_scale, down_scale: of the latter; activations are then rounded to e4m3. On SM90 (E, N/128, K/128) float32;
            on SM100 int32, see `prepare_powers`.
        up_bias, down_bias: (E, N) and (E, H) or None.
    """
    a = activation
    run = torch.ops.moetor.deepgemm_experts if needs_operator(x_TH) else _deepgemm_experts
    out: Tensor = run(
        x_TH, ids_TK, routing_TK, up, up_scale, up_bias, down, down_scale, down_bias, gated, interleaved,
        a.kind, a.alpha, a.limit, a.limit_after, a.up_offset, a.gate_softcap, a.up_softcap,
    )  # fmt: skip
    return out


def _deepgemm_experts(
    x: Tensor, ids: Tensor, routing: Tensor, up: Tensor, up_scale: Tensor | None, up_bias: Tensor | None,
    down: Tensor, down_scale: Tensor | None, down_bias: Tensor | None, gated: bool, interleaved: bool, kind: str,
    alpha: float, limit: float | None, limit_after: bool, up_offset: float, gate_softcap: float | None,
    up_softcap: float | None,
) -> Tensor:  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    gate = (kind, gated, alpha, limit, limit_after, up_offset, gate_softcap, up_softcap)
    library = loaded(DEEP_GEMM)
    ids, routing = ids.contiguous(), routing.contiguous()
    with torch.cuda.device_of(x):
        order = pad_by_expert(ids, up.shape[0], library.get_mk_alignment_for_contiguous_layout())
        rows = _spread_tokens(x, ids, order, up.shape[0], up_scale)
        product = _product(library, rows, up, up_scale, order)
        inner = _gated(product, up_bias, order, interleaved, gate, down_scale)
        del rows, product
        rows_MH = _product(library, inner, down, down_scale, order)
        block = min(1024, next_power_of_2(x.shape[1]))
        _combine.launch(
            (x.shape[0], cdiv(x.shape[1], block), 1),
            (rows_MH, ids, order.row_S, routing, down_bias, out, down.shape[0], x.shape[1], *_strides(down_bias)),
            (ids.shape[1], block, down_bias is not None), 4, 3, x.device.index or 0,
        )  # fmt: skip
    return out


def prepare_powers(scale: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """Scales that are powers of two as SM100 reads them: int32, four exponents each, (E, N, ceil(K/block/4)).

    Args:
        scale: (E, ceil(N/block), ceil(K/block)) float32.
        rows, columns: N and K of a matrix.
        block: (128, 128) of e4m3, (1, 32) of e2m1.
    """
    recipe = (1, *block) if block[0] > 1 else block
    out: Tensor = loaded(DEEP_GEMM).transform_sf_into_required_layout(
        scale, rows, columns, recipe, num_groups=scale.shape[0], is_sfa=False
    )
    return out


def _spread_tokens(
    x: Tensor, ids: Tensor, order: Padded, num_experts: int, weight_scale: Tensor | None
) -> tuple[Tensor, ...]:
    """Rows (M, H), and where they are e4m3 their scales, by columns."""
    (T, H), K, M, device = x.shape, ids.shape[1], order.num_rows, x.device.index or 0
    if weight_scale is None:
        rows = x.new_empty(M, H)
        block = min(1024, next_power_of_2(H))
        args = (x, ids, order.row_S, rows, num_experts, H, *x.stride())
        _spread.launch((T, cdiv(H, block), 1), args, (K, block), 4, 3, device)
        return (rows,)
    rows, scale, powers = _room_for_e4m3(M, H, weight_scale)
    groups = min(8, next_power_of_2(cdiv(H, GROUP)))
    args = (x, ids, order.row_S, rows, scale, num_experts, H, M, *x.stride())
    _spread_quantized.launch((T, cdiv(H, GROUP * groups), 1), args, (K, groups, powers), 4, 3, device)
    return rows, scale


def _room_for_e4m3(M: int, K: int, weight_scale: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Rows (M, K), their scales (K/128, M) float32 or (K/512, M, 4) bytes, and whether it is the latter."""
    rows = weight_scale.new_empty(M, K, dtype=_FP8)
    if weight_scale.dtype == torch.float32:
        return rows, weight_scale.new_empty(cdiv(K, GROUP), M), False
    # where four exponents do not fill a number, the rest of it is zero
    make = torch.zeros if K % (4 * GROUP) else torch.empty
    return rows, make(cdiv(K, 4 * GROUP), M, 4, dtype=torch.uint8, device=rows.device), True


def _gated(
    product: Tensor, bias: Tensor | None, order: Padded, interleaved: bool, gate: tuple[Any, ...],
    weight_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The second product's input (M, I), and where it is e4m3 its scales, by columns."""
    M, N = product.shape
    I = N // 2 if gate[1] else N
    device = product.device.index or 0
    stride_n, o_up = (2, 1) if interleaved else (1, I)
    bias_outer, bias_column = _strides(bias)
    numbers = (
        order.most_tiles, I, N, stride_n, o_up, bias_outer, bias_column * stride_n, bias_column * o_up,
    )  # fmt: skip
    if weight_scale is None:
        inner = product.new_empty(M, I)
        rows, columns = 8, min(512, next_power_of_2(I))
        grid = (order.most_tiles * (order.alignment // rows), cdiv(I, columns), 1)
        constants = (order.alignment, rows, columns, bias is not None, *gate)
        _gate.launch(grid, (product, bias, order.tiles, inner, *numbers), constants, 4, 3, device)
        return (inner,)
    inner, scale, powers = _room_for_e4m3(M, I, weight_scale)
    grid = (order.most_tiles * (order.alignment // 32), cdiv(I, GROUP), 1)
    constants = (order.alignment, 32, powers, bias is not None, *gate)
    _gate_quantized.launch(grid, (product, bias, order.tiles, inner, scale, *numbers, M), constants, 4, 3, device)
    return inner, scale


def _product(library: Any, rows: tuple[Tensor, ...], matrices: Tensor, scale: Tensor | None, order: Padded) -> Tensor:
    """Each padded row times its expert's matrix, (M, N) bfloat16."""
    out = torch.empty(order.num_rows, matrices.shape[1], dtype=torch.bfloat16, device=matrices.device)
    if scale is None:
        library.m_grouped_bf16_gemm_nt_contiguous(rows[0], matrices, out, order.layout_M)
        return out
    data, scale_of_rows = rows
    if scale_of_rows.dtype == torch.uint8:
        scale_of_rows = scale_of_rows.view(torch.int32).squeeze(2)
    # (M, groups) whose columns are contiguous, as the copy engine takes them: nothing is copied
    activations = (data, scale_of_rows.t())
    recipes = {} if matrices.dtype == _FP8 else {"recipe_a": (1, GROUP), "recipe_b": (1, 32)}
    library.m_grouped_fp8_gemm_nt_contiguous(activations, (matrices, scale), out, order.layout_M, **recipes)
    return out


def _strides(bias: Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


define(
    "deepgemm_experts(Tensor x, Tensor ids, Tensor routing, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down,"
    " Tensor? down_scale, Tensor? down_bias, bool gated, bool interleaved, str kind, float alpha, float? limit,"
    " bool limit_after, float up_offset, float? gate_softcap, float? up_softcap) -> Tensor",
    _deepgemm_experts,
    lambda x, *_: x.new_empty(x.shape),
)
