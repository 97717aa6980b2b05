"""What lies around the products: pairs to padded rows, tokens to rows, the gate, and rows to tokens.

A token is read once and written to each of its rows. Padding is neither written nor computed with.
"""

import triton
import triton.language as tl

from ..fused_experts.gate import apply_gate
from ..fused_experts.rows import rows_of_tile

LARGEST = tl.constexpr(448.0)
"""Of e4m3."""


@triton.jit
def place(p_pairs, p_tiles, p_row, p_layout, most_tiles, BM: tl.constexpr):
    """The padded row of each pair, and the expert of each padded row, -1 for nobody's."""
    tile = tl.program_id(0)
    rows = tile * BM + tl.arange(0, BM)
    experts = tl.zeros([BM], tl.int32) - 1
    if tile < tl.load(p_tiles + 3 * most_tiles):
        expert, first, end = rows_of_tile(p_tiles, tile)
        sorted_rows = first + tl.arange(0, BM)
        m_rows = sorted_rows < end
        pairs = tl.load(p_pairs + sorted_rows, mask=m_rows, other=0)
        tl.store(p_row + pairs, rows, mask=m_rows)
        experts = tl.where(m_rows, expert, -1)
    tl.store(p_layout + rows, experts)


@triton.jit
def spread(
    p_x, p_ids, p_row, p_out, num_experts, hidden, stride_xt, stride_xh, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Each token's columns to all of its rows."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < hidden
    x = tl.load(p_x + token * stride_xt + columns * stride_xh, mask=m_columns, other=0.0)
    for slot in tl.static_range(TOP_K):
        id = tl.load(p_ids + token * TOP_K + slot)
        has_expert = (id >= 0) & (id < num_experts)
        row = tl.load(p_row + token * TOP_K + slot, mask=has_expert, other=0).to(tl.int64)
        tl.store(p_out + row * hidden + columns, x, mask=m_columns & has_expert)


@triton.jit
def quantize_groups(x, dtype: tl.constexpr, POWERS: tl.constexpr):
    """e4m3 and fp32 scales of (G, 128) fp32: amax / 448 a row, or the next power of two; rows of zeros to zeros."""
    scale = tl.div_rn(tl.max(tl.abs(x), 1), LARGEST)
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    safe = tl.where(scale > 0, scale, 1.0)
    # quotients of the largest may be a rounding above 448, which is not a number in e4m3
    q = tl.clamp(tl.div_rn(x, tl.broadcast_to(safe[:, None], x.shape)), -LARGEST, LARGEST)
    return q.to(dtype), scale


@triton.jit
def store_scales(p_scale, groups, rows, num_rows, scale, mask, POWERS: tl.constexpr):
    """Scales by groups of 128 columns and by rows, as DeepGEMM reads them: fp32 (groups, M), or their exponents.

    Exponents are bytes, four of one row in a number: (groups / 4, M, 4).
    """
    groups = groups.to(tl.int64)
    if POWERS:
        exponents = scale.to(tl.int32, bitcast=True) >> 23
        tl.store(p_scale + (groups // 4 * num_rows + rows) * 4 + groups % 4, exponents.to(tl.uint8), mask=mask)
    else:
        tl.store(p_scale + groups * num_rows + rows, scale, mask=mask)


@triton.jit
def spread_quantized(
    p_x, p_ids, p_row, p_out, p_scale, num_experts, hidden, num_rows, stride_xt, stride_xh,
    TOP_K: tl.constexpr, GROUPS: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """The same in e4m3, with a scale for each 128 columns."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    m_groups = groups * 128 < hidden
    m_columns = columns < hidden
    x = tl.load(p_x + token * stride_xt + columns * stride_xh, mask=m_columns, other=0.0).to(tl.float32)
    q, scale = quantize_groups(x, p_out.dtype.element_ty, POWERS)
    for slot in tl.static_range(TOP_K):
        id = tl.load(p_ids + token * TOP_K + slot)
        has_expert = (id >= 0) & (id < num_experts)
        row = tl.load(p_row + token * TOP_K + slot, mask=has_expert, other=0).to(tl.int64)
        tl.store(p_out + row * hidden + columns, q, mask=m_columns & has_expert)
        store_scales(p_scale, groups, row, num_rows, scale, m_groups & has_expert, POWERS)


@triton.jit
def _gated(
    p_product, p_bias, expert, row, num_rows, block, inner, width, stride_n, o_up, stride_be, stride_bn, o_up_bias,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """fp32 (ROWS, COLUMNS) of the gate's result for padded rows from `row` on; rows, columns, and which there are."""
    local = tl.arange(0, ROWS)
    rows = row.to(tl.int64) + local
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    mask = (local < num_rows)[:, None] & (columns < inner)[None, :]
    p_gate = p_product + rows[:, None] * width + columns[None, :] * stride_n
    gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(p_gate + o_up, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        p_own = p_bias + expert.to(tl.int64) * stride_be + columns * stride_bn
        gate += tl.load(p_own, mask=columns < inner, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(p_own + o_up_bias, mask=columns < inner, other=0.0).to(tl.float32)[None, :]
    out = apply_gate(gate, up, KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP)
    return out, rows, columns, mask


@triton.jit
def gate_rows(
    p_product, p_bias, p_tiles, p_out, most_tiles, inner, width, stride_n, o_up, stride_be, stride_bn, o_up_bias,
    BM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """First product (M, N) to the second's input (M, I)."""
    tile, part = tl.program_id(0) // (BM // ROWS), tl.program_id(0) % (BM // ROWS)
    if tile < tl.load(p_tiles + 3 * most_tiles):
        expert, first, end = rows_of_tile(p_tiles, tile)
        num_rows = end - first - part * ROWS
        if num_rows > 0:
            out, rows, columns, mask = _gated(
                p_product, p_bias, expert, tile * BM + part * ROWS, num_rows, tl.program_id(1), inner, width, stride_n,
                o_up, stride_be, stride_bn, o_up_bias, ROWS, COLUMNS, HAS_BIAS, KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER,
                UP_OFFSET, GATE_CAP, UP_CAP,
            )  # fmt: skip
            p_to = p_out + rows[:, None] * inner + columns[None, :]
            tl.store(p_to, out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def gate_rows_quantized(
    p_product, p_bias, p_tiles, p_out, p_scale, most_tiles, inner, width, stride_n, o_up, stride_be, stride_bn,
    o_up_bias, most_rows,
    BM: tl.constexpr, ROWS: tl.constexpr, POWERS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """The same in e4m3, with scales."""
    tile, part = tl.program_id(0) // (BM // ROWS), tl.program_id(0) % (BM // ROWS)
    if tile < tl.load(p_tiles + 3 * most_tiles):
        expert, first, end = rows_of_tile(p_tiles, tile)
        num_rows = end - first - part * ROWS
        if num_rows > 0:
            out, rows, columns, mask = _gated(
                p_product, p_bias, expert, tile * BM + part * ROWS, num_rows, tl.program_id(1), inner, width, stride_n,
                o_up, stride_be, stride_bn, o_up_bias, ROWS, 128, HAS_BIAS, KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER,
                UP_OFFSET, GATE_CAP, UP_CAP,
            )  # fmt: skip
            q, scale = quantize_groups(out, p_out.dtype.element_ty, POWERS)
            tl.store(p_out + rows[:, None] * inner + columns[None, :], q, mask=mask)
            # padded rows get a scale as well: they are nobody's
            store_scales(p_scale, tl.program_id(1), rows, most_rows, scale, None, POWERS)


@triton.jit
def combine(
    p_rows, p_ids, p_row, p_routing, p_bias, p_out, num_experts, hidden, stride_be, stride_bn,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Each token's rows, weighted, in slot order, in fp32, rounded once; pairs of no expert are not read."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < hidden
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        id = tl.load(p_ids + pair)
        has_expert = (id >= 0) & (id < num_experts)
        row = tl.load(p_row + pair, mask=has_expert, other=0).to(tl.int64)
        term = tl.load(p_rows + row * hidden + columns, mask=m_columns & has_expert, other=0.0).to(tl.float32)
        if HAS_BIAS:
            p_own = p_bias + id.to(tl.int64) * stride_be + columns * stride_bn
            term += tl.load(p_own, mask=m_columns & has_expert, other=0.0).to(tl.float32)
        weight = tl.load(p_routing + pair, mask=has_expert, other=0.0).to(tl.float32)
        acc += term * weight
    tl.store(p_out + token * hidden + columns, acc.to(p_out.dtype.element_ty), mask=m_columns)
