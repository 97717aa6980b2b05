"""The two products of an expert over tiles of its rows, and the ordered sum.

`up_product` gathers its rows of x, computes gate and up in two accumulators (or one wide one
where their columns are interleaved), applies the gate and writes the inner rows in expert order.
`down_product` weights its rows and writes them in pair order, for `combine` to add.
"""

import triton
import triton.language as tl

from .gate import apply_gate
from .rows import sorted_tile, tile_of_program


@triton.jit
def load_block(descriptor, expert, column, k, BN: tl.constexpr, BK: tl.constexpr, BY_ROWS: tl.constexpr):
    """(BK, BN) of an expert's matrix through its descriptor; what lies outside the matrix is zero."""
    if BY_ROWS:
        return tl.trans(tl.reshape(descriptor.load([expert, column, k]), [BN, BK]))
    else:
        return tl.reshape(descriptor.load([expert, k, column]), [BK, BN])


@triton.jit
def up_product(
    p_x, p_pairs, p_ends, p_gate, p_up, p_gate_bias, p_up_bias, p_inner,
    num_tiles, num_experts, hidden, inner, top_k,
    stride_xt, stride_xh, stride_we, stride_wn, stride_wk, o_up, stride_be, stride_bn, o_up_bias,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BY_ROWS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    tile, block = tile_of_program(num_tiles, tl.cdiv(inner, BN), GROUP)
    expert, first, end = sorted_tile(p_ends, tile, num_experts, EXPERTS, BM)
    if expert >= num_experts:
        return
    rows = first + tl.arange(0, BM)
    m_rows = rows < end
    # rows past the end read token 0 and are not stored
    tokens = tl.load(p_pairs + rows, mask=m_rows, other=0) // top_k
    k = tl.arange(0, BK)
    p_a = p_x + tokens.to(tl.int64)[:, None] * stride_xt + k[None, :] * stride_xh
    columns = block * BN + tl.arange(0, BN)
    if WIDE:
        stored = block * (2 * BN) + tl.arange(0, 2 * BN)
        m_stored = stored < 2 * inner
        if not TMA:
            p_w = p_gate + expert.to(tl.int64) * stride_we + k[:, None] * stride_wk + stored[None, :] * stride_wn
        acc = tl.zeros([BM, 2 * BN], tl.float32)
        for start in range(0, hidden, BK):
            m_k = start + k < hidden
            a = tl.load(p_a) if EVEN_K else tl.load(p_a, mask=m_k[None, :], other=0.0)
            if TMA:
                w = load_block(p_gate, expert, block * (2 * BN), start, 2 * BN, BK, BY_ROWS)
            else:
                m_w = m_k[:, None] & m_stored[None, :]
                w = tl.load(p_w) if EVEN_K and EVEN_N else tl.load(p_w, mask=m_w, other=0.0)
                p_w += BK * stride_wk
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
            p_a += BK * stride_xh
        if HAS_BIAS:
            p_b = p_gate_bias + expert.to(tl.int64) * stride_be + stored * stride_bn
            acc += tl.load(p_b, mask=m_stored, other=0.0).to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(acc, [BM, BN, 2]))
    else:
        m_columns = columns < inner
        if not TMA:
            o_w = expert.to(tl.int64) * stride_we + k[:, None] * stride_wk + columns[None, :] * stride_wn
            p_g = p_gate + o_w
            p_u = p_up + o_up + o_w
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for start in range(0, hidden, BK):
            m_k = start + k < hidden
            m_w = m_k[:, None] & m_columns[None, :]
            a = tl.load(p_a) if EVEN_K else tl.load(p_a, mask=m_k[None, :], other=0.0)
            if TMA:
                g = load_block(p_gate, expert, block * BN, start, BN, BK, BY_ROWS)
            else:
                g = tl.load(p_g) if EVEN_K and EVEN_N else tl.load(p_g, mask=m_w, other=0.0)
                p_g += BK * stride_wk
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
            if GATED:
                if TMA:
                    u = load_block(p_up, expert, block * BN, start, BN, BK, BY_ROWS)
                else:
                    u = tl.load(p_u) if EVEN_K and EVEN_N else tl.load(p_u, mask=m_w, other=0.0)
                    p_u += BK * stride_wk
                up = tl.dot(a, u, up, input_precision=PRECISION)
            p_a += BK * stride_xh
        if HAS_BIAS:
            o_b = expert.to(tl.int64) * stride_be + columns * stride_bn
            gate += tl.load(p_gate_bias + o_b, mask=m_columns, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(p_up_bias + o_up_bias + o_b, mask=m_columns, other=0.0).to(tl.float32)[None, :]
    out = apply_gate(gate, up, KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP)
    p_out = p_inner + rows.to(tl.int64)[:, None] * inner + columns[None, :]
    tl.store(p_out, out.to(p_inner.dtype.element_ty), mask=m_rows[:, None] & (columns < inner)[None, :])


@triton.jit
def down_product(
    p_inner, p_pairs, p_ends, p_down, p_bias, p_routing, p_rows,
    num_tiles, num_experts, hidden, inner,
    stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    tile, block = tile_of_program(num_tiles, tl.cdiv(hidden, BN), GROUP)
    expert, first, end = sorted_tile(p_ends, tile, num_experts, EXPERTS, BM)
    if expert >= num_experts:
        return
    rows = first + tl.arange(0, BM)
    m_rows = rows < end
    k = tl.arange(0, BK)
    columns = block * BN + tl.arange(0, BN)
    m_columns = columns < hidden
    acc = tl.zeros([BM, BN], tl.float32)
    if TMA:
        # rows past the expert's end are the next expert's: read, and not stored
        for start in range(0, inner, BK):
            a = p_inner.load([first, start])
            w = load_block(p_down, expert, block * BN, start, BN, BK, BY_ROWS)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
    else:
        safe = tl.where(m_rows, rows, first).to(tl.int64)
        p_a = p_inner + safe[:, None] * inner + k[None, :]
        p_w = p_down + expert.to(tl.int64) * stride_we + k[:, None] * stride_wk + columns[None, :] * stride_wn
        for start in range(0, inner, BK):
            m_k = start + k < inner
            m_w = m_k[:, None] & m_columns[None, :]
            a = tl.load(p_a) if EVEN_K else tl.load(p_a, mask=m_k[None, :], other=0.0)
            w = tl.load(p_w) if EVEN_K and EVEN_N else tl.load(p_w, mask=m_w, other=0.0)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
            p_a += BK
            p_w += BK * stride_wk
    if HAS_BIAS:
        p_b = p_bias + expert.to(tl.int64) * stride_be + columns * stride_bn
        acc += tl.load(p_b, mask=m_columns, other=0.0).to(tl.float32)[None, :]
    pairs = tl.load(p_pairs + rows, mask=m_rows, other=0)
    acc *= tl.load(p_routing + pairs, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    p_out = p_rows + pairs.to(tl.int64)[:, None] * hidden + columns[None, :]
    tl.store(p_out, acc.to(p_rows.dtype.element_ty), mask=m_rows[:, None] & m_columns[None, :])


@triton.jit
def combine(p_rows, p_ids, p_out, num_experts, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Add the rows of a token's pairs in slot order, in fp32; pairs of no expert were never written."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < hidden
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        id = tl.load(p_ids + pair)
        has_expert = (id >= 0) & (id < num_experts)
        acc += tl.load(p_rows + pair * hidden + columns, mask=m_columns & has_expert, other=0.0).to(tl.float32)
    tl.store(p_out + token * hidden + columns, acc.to(p_out.dtype.element_ty), mask=m_columns)
