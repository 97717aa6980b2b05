"""The two products of an expert over tiles of its rows, and the ordered sum.

`up_product` gathers its rows of x, multiplies them by gate and up columns side by side, applies
the gate and writes the inner rows in expert order. `down_product` weights its rows and writes them
in pair order, for `combine` to add.
"""

import triton
import triton.language as tl

from .gate import apply_gate
from .halves import store_halves, within_range
from .rows import rows_of_tile, tile_of_program


@triton.jit
def load_block(
    descriptor, expert, column, k, BN: tl.constexpr, BK: tl.constexpr, BY_ROWS: tl.constexpr, PAIRED: tl.constexpr
):
    """(BK, BN) of an expert's matrix through its descriptor; what lies outside the matrix is zero.

    PAIRED: half of them gate columns from `column` on, half the up columns that belong to them.
    """
    if PAIRED:
        return tl.trans(tl.reshape(descriptor.load([expert, 0, column, k]), [BN, BK]))
    elif BY_ROWS:
        return tl.trans(tl.reshape(descriptor.load([expert, column, k]), [BN, BK]))
    else:
        return tl.reshape(descriptor.load([expert, k, column]), [BK, BN])


@triton.jit
def add_product(acc, lost, a, w, PRECISION: tl.constexpr):
    """acc + a · w, and what rounding lost, which the next call adds; tensor cores add wider and lose nothing here.

    Exact fp32 runs on no tensor core, where a sum over thousands of terms in one sequence would
    lose twice what cuBLAS loses, which adds in several.
    """
    if PRECISION == "ieee" and a.dtype == tl.float32:
        product = tl.dot(a, w, lost, input_precision=PRECISION)
        total = acc + product
        return total, product - (total - acc)
    else:
        return tl.dot(a, w, acc, input_precision=PRECISION), lost


@triton.jit
def _up_tile(
    p_x, p_pairs, p_gate, p_up, p_gate_bias, p_up_bias, p_inner, p_kept_gate, p_kept_up,
    expert, first, end, block, hidden, inner, top_k,
    stride_xt, stride_xh, stride_we, stride_wn, stride_wk, o_up, stride_be, stride_bn, o_up_bias, stride_kept,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BY_ROWS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, BM)
    m_rows = rows < end
    # rows past the end read token 0 and are not stored
    pairs = tl.load(p_pairs + rows, mask=m_rows, other=0)
    tokens = pairs // top_k
    k = tl.arange(0, BK)
    p_a = p_x + tokens.to(tl.int64)[:, None] * stride_xt + k[None, :] * stride_xh
    columns = block * BN + tl.arange(0, BN)
    m_columns = columns < inner
    if TMA and ORDER == "apart":
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for start in range(0, hidden, BK):
            a = tl.load(p_a) if EVEN_K else tl.load(p_a, mask=(start + k < hidden)[None, :], other=0.0)
            g = load_block(p_gate, expert, block * BN, start, BN, BK, BY_ROWS, False)
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
            u = load_block(p_up, expert, block * BN, start, BN, BK, BY_ROWS, False)
            up = tl.dot(a, u, up, input_precision=PRECISION)
            p_a += BK * stride_xh
    else:
        # One accumulator for both: the tensor cores read a once.
        WIDTH: tl.constexpr = 2 * BN if GATED else BN
        wide = tl.arange(0, WIDTH)
        if ORDER == "interleaved":
            stored = block * WIDTH + wide
            m_stored = stored < 2 * inner
            o_w = stored.to(tl.int64) * o_up
        else:
            stored = block * BN + wide % BN
            m_stored = stored < inner
            o_w = stored.to(tl.int64) * stride_wn + (wide // BN).to(tl.int64) * o_up
        if not TMA:
            p_w = p_gate + expert.to(tl.int64) * stride_we + o_w[None, :] + k[:, None] * stride_wk
            if ORDER == "apart":
                p_second = p_up + expert.to(tl.int64) * stride_we + o_w[None, :] + k[:, None] * stride_wk
                p_w = tl.where((wide < BN)[None, :], p_w, p_second)
        acc = tl.zeros([BM, WIDTH], tl.float32)
        lost = tl.zeros([BM, WIDTH], tl.float32)
        for start in range(0, hidden, BK):
            m_k = start + k < hidden
            a = tl.load(p_a) if EVEN_K else tl.load(p_a, mask=m_k[None, :], other=0.0)
            if TMA:
                column = block * WIDTH if ORDER == "interleaved" else block * BN
                w = load_block(p_gate, expert, column, start, WIDTH, BK, BY_ROWS, ORDER == "stacked")
            else:
                m_w = m_k[:, None] & m_stored[None, :]
                w = tl.load(p_w) if EVEN_K and EVEN_N else tl.load(p_w, mask=m_w, other=0.0)
                p_w += BK * stride_wk
            acc, lost = add_product(acc, lost, a, w, PRECISION)
            p_a += BK * stride_xh
        if not GATED:
            gate = acc
            up = acc
        elif ORDER == "interleaved":
            gate, up = tl.split(tl.reshape(acc, [BM, BN, 2]))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN]), (0, 2, 1)))
    if HAS_BIAS:
        o_b = expert.to(tl.int64) * stride_be + columns * stride_bn
        gate += tl.load(p_gate_bias + o_b, mask=m_columns, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(p_up_bias + o_up_bias + o_b, mask=m_columns, other=0.0).to(tl.float32)[None, :]
    if p_kept_gate is not None:
        gate = within_range(gate, p_kept_gate)
        up = within_range(up, p_kept_gate)
        o_kept = pairs.to(tl.int64) * stride_kept
        INTERLEAVED: tl.constexpr = GATED and p_kept_up is None
        store_halves(p_kept_gate, p_kept_up, o_kept, m_rows, block, inner, gate, up, GATED, INTERLEAVED)
    out = apply_gate(gate, up, KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP)
    p_out = p_inner + rows.to(tl.int64)[:, None] * inner + columns[None, :]
    tl.store(p_out, out.to(p_inner.dtype.element_ty), mask=m_rows[:, None] & m_columns[None, :])


@triton.jit
def up_product(
    p_x, p_pairs, p_tiles, p_gate, p_up, p_gate_bias, p_up_bias, p_inner, p_kept_gate, p_kept_up,
    most_tiles, hidden, inner, top_k,
    stride_xt, stride_xh, stride_we, stride_wn, stride_wk, o_up, stride_be, stride_bn, o_up_bias, stride_kept,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, HALVE: tl.constexpr,
    ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BY_ROWS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.load(p_tiles + 3 * most_tiles)
    blocks = tl.cdiv(inner, BN)
    if tl.program_id(0) >= num_tiles * blocks:
        return
    tile, block = tile_of_program(tl.program_id(0), num_tiles, blocks, GROUP)
    expert, first, end = rows_of_tile(p_tiles, tile)
    # An expert's last tile is half empty on average; half a tile does for it every other time.
    if HALVE and end - first <= BM // 2:
        _up_tile(
            p_x, p_pairs, p_gate, p_up, p_gate_bias, p_up_bias, p_inner, p_kept_gate, p_kept_up,
            expert, first, end, block, hidden, inner, top_k,
            stride_xt, stride_xh, stride_we, stride_wn, stride_wk, o_up, stride_be, stride_bn, o_up_bias, stride_kept,
            BM // 2, BN, BK, ORDER, HAS_BIAS, EVEN_K, EVEN_N, PRECISION, TMA, BY_ROWS,
            KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP,
        )  # fmt: skip
    else:
        _up_tile(
            p_x, p_pairs, p_gate, p_up, p_gate_bias, p_up_bias, p_inner, p_kept_gate, p_kept_up,
            expert, first, end, block, hidden, inner, top_k,
            stride_xt, stride_xh, stride_we, stride_wn, stride_wk, o_up, stride_be, stride_bn, o_up_bias, stride_kept,
            BM, BN, BK, ORDER, HAS_BIAS, EVEN_K, EVEN_N, PRECISION, TMA, BY_ROWS,
            KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP,
        )  # fmt: skip


@triton.jit
def _add_rows_product(
    acc, lost, p_inner, p_down, expert, first, end, block, hidden, inner, stride_we, stride_wn, stride_wk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """acc + rows (BM, inner) of a tile · (inner, BN) of the expert's matrix."""
    if TMA:
        # rows past the expert's end are the next expert's: read, and not stored
        for start in range(0, inner, BK):
            a = p_inner.load([first, start])
            w = load_block(p_down, expert, block * BN, start, BN, BK, BY_ROWS, False)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
    else:
        rows = first + tl.arange(0, BM)
        columns = block * BN + tl.arange(0, BN)
        m_columns = columns < hidden
        k = tl.arange(0, BK)
        safe = tl.where(rows < end, rows, first).to(tl.int64)
        p_a = p_inner + safe[:, None] * inner + k[None, :]
        p_w = p_down + expert.to(tl.int64) * stride_we + k[:, None] * stride_wk + columns[None, :] * stride_wn
        for start in range(0, inner, BK):
            m_k = start + k < inner
            m_w = m_k[:, None] & m_columns[None, :]
            a = tl.load(p_a) if EVEN_K else tl.load(p_a, mask=m_k[None, :], other=0.0)
            w = tl.load(p_w) if EVEN_K and EVEN_N else tl.load(p_w, mask=m_w, other=0.0)
            acc, lost = add_product(acc, lost, a, w, PRECISION)
            p_a += BK
            p_w += BK * stride_wk
    return acc, lost


@triton.jit
def down_product(
    p_inner, p_second, p_pairs, p_tiles, p_down, p_second_down, p_bias, p_routing, p_rows,
    most_tiles, hidden, inner,
    stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of inner times a matrix of each expert; a second pair of them is added, gradients of gate and up apart."""
    num_tiles = tl.load(p_tiles + 3 * most_tiles)
    blocks = tl.cdiv(hidden, BN)
    # With the copy engine, one program a multiprocessor: the next tile's blocks arrive while this one's are stored.
    for program in tl.range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0), flatten=TMA):
        tile, block = tile_of_program(program, num_tiles, blocks, GROUP)
        expert, first, end = rows_of_tile(p_tiles, tile)
        rows = first + tl.arange(0, BM)
        m_rows = rows < end
        columns = block * BN + tl.arange(0, BN)
        m_columns = columns < hidden
        acc = tl.zeros([BM, BN], tl.float32)
        lost = tl.zeros([BM, BN], tl.float32)
        acc, lost = _add_rows_product(
            acc, lost, p_inner, p_down, expert, first, end, block, hidden, inner, stride_we, stride_wn, stride_wk,
            BM, BN, BK, EVEN_K, EVEN_N, PRECISION, TMA, BY_ROWS,
        )  # fmt: skip
        if p_second is not None:
            acc, lost = _add_rows_product(
                acc, lost, p_second, p_second_down, expert, first, end, block, hidden, inner,
                stride_we, stride_wn, stride_wk, BM, BN, BK, EVEN_K, EVEN_N, PRECISION, TMA, BY_ROWS,
            )  # fmt: skip
        if HAS_BIAS:
            p_b = p_bias + expert.to(tl.int64) * stride_be + columns * stride_bn
            acc += tl.load(p_b, mask=m_columns, other=0.0).to(tl.float32)[None, :]
        pairs = tl.load(p_pairs + rows, mask=m_rows, other=0)
        if p_routing is not None:
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
