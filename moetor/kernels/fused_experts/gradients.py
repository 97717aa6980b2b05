"""The products of the backward pass, over tiles of an expert's rows or over all of them.

`inner_gradient` multiplies rows of the result's gradient by the second matrix and goes back through
the gate; `weight_gradient` multiplies an expert's rows on both sides of a product; `bias_gradient`
and `routing_gradient` are sums. The gradient of x is `tiles.down_product` with the first matrix, and
`tiles.combine`. Nothing is added atomically.

Rows lie in expert order, each expert's from a multiple of PAD on; those in between are zeros, so
that a product over rows takes them in whole blocks. For the same reason x and the result's
gradient are sorted in memory first: gathered inside the loop over rows, Triton would not load them
ahead.
"""

import triton
import triton.language as tl

from .gate import apply_gate_with_slopes
from .halves import load_halves, store_halves
from .rows import rows_of_tile, tile_of_program
from .tiles import add_product, load_block


@triton.jit
def sort_rows(
    p_source, p_pairs, p_tiles, p_out, most_tiles, hidden, top_k, stride_st, stride_sh,
    BM: tl.constexpr, PAD: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the pairs' tokens in expert order, and zeros in between."""
    tile = tl.program_id(0) // (BM // BR)
    if tile >= tl.load(p_tiles + 3 * most_tiles):
        return
    _expert, first, end = rows_of_tile(p_tiles, tile)
    rows = first + tl.program_id(0) % (BM // BR) * BR + tl.arange(0, BR)
    m_rows = rows < end
    tokens = tl.load(p_pairs + rows, mask=m_rows, other=0) // top_k
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < hidden
    p_row = p_source + tokens.to(tl.int64)[:, None] * stride_st + columns.to(tl.int64)[None, :] * stride_sh
    block = tl.load(p_row, mask=m_rows[:, None] & m_columns[None, :], other=0.0)
    m_stored = rows < tl.cdiv(end, PAD) * PAD
    p_to = p_out + rows.to(tl.int64)[:, None] * hidden + columns[None, :]
    tl.store(p_to, block, mask=m_stored[:, None] & m_columns[None, :])


@triton.jit
def _through_gate(
    back, p_pairs, p_routing, p_kept_gate, p_kept_up, p_inner, p_gate_grad, p_up_grad,
    first, end, block, inner, stride_kept,
    PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """Store what follows from the gradient (BM, BN) of a block of inner rows; their products with it, (BM,)."""
    BM: tl.constexpr = back.shape[0]
    BN: tl.constexpr = back.shape[1]
    rows = first + tl.arange(0, BM)
    m_rows = rows < end
    columns = block * BN + tl.arange(0, BN)
    m_columns = columns < inner
    pairs = tl.load(p_pairs + rows, mask=m_rows, other=0)
    o_kept = pairs.to(tl.int64) * stride_kept
    gate, up = load_halves(p_kept_gate, p_kept_up, o_kept, m_rows, block, inner, BN, GATED, INTERLEAVED)
    value, gate_slope, up_slope = apply_gate_with_slopes(
        gate, up, KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP
    )
    dots = tl.sum(back * value, 1)
    weights = tl.load(p_routing + pairs, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    # rows in between: zeros, whatever was multiplied for them
    m_stored = rows < tl.cdiv(end, PAD) * PAD
    wide_rows = rows.to(tl.int64)
    if p_inner is not None:
        value = tl.where(m_rows[:, None], value * weights, 0.0)
        p_out = p_inner + wide_rows[:, None] * inner + columns[None, :]
        tl.store(p_out, value.to(p_inner.dtype.element_ty), mask=m_stored[:, None] & m_columns[None, :])
    if p_gate_grad is not None:
        back = tl.where(m_rows[:, None], back * weights, 0.0)
        gate, up = back * gate_slope, back * up_slope
        o_out = wide_rows * stride_kept
        store_halves(p_gate_grad, p_up_grad, o_out, m_stored, block, inner, gate, up, GATED, INTERLEAVED)
    return dots


@triton.jit
def _inner_tile(
    p_grad, p_pairs, p_down, p_routing, p_kept_gate, p_kept_up, p_inner, p_gate_grad, p_up_grad, p_dots,
    expert, first, end, block, hidden, inner, num_pairs, stride_kept, stride_we, stride_wn, stride_wk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BY_ROWS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros([BM, BN], tl.float32)
    lost = tl.zeros([BM, BN], tl.float32)
    rows = first + tl.arange(0, BM)
    k = tl.arange(0, BK)
    # rows past the end are read, and not used: the next expert's, or the first of this one's
    p_a = p_grad + tl.where(rows < end, rows, first).to(tl.int64)[:, None] * hidden + k[None, :]
    columns = block * BN + tl.arange(0, BN)
    m_columns = columns < inner
    if not TMA:
        p_w = p_down + expert.to(tl.int64) * stride_we + k[:, None] * stride_wk + columns[None, :] * stride_wn
    for start in range(0, hidden, BK):
        m_k = start + k < hidden
        a = tl.load(p_a) if EVEN_K else tl.load(p_a, mask=m_k[None, :], other=0.0)
        if TMA:
            w = load_block(p_down, expert, block * BN, start, BN, BK, BY_ROWS, False)
        else:
            m_w = m_k[:, None] & m_columns[None, :]
            w = tl.load(p_w) if EVEN_K and EVEN_N else tl.load(p_w, mask=m_w, other=0.0)
            p_w += BK * stride_wk
        acc, lost = add_product(acc, lost, a, w, PRECISION)
        p_a += BK
    # half of the columns at a time: the gate needs many registers
    left, right = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))
    dots = _through_gate(
        left, p_pairs, p_routing, p_kept_gate, p_kept_up, p_inner, p_gate_grad, p_up_grad,
        first, end, 2 * block, inner, stride_kept, PAD, INTERLEAVED,
        KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP,
    )  # fmt: skip
    dots += _through_gate(
        right, p_pairs, p_routing, p_kept_gate, p_kept_up, p_inner, p_gate_grad, p_up_grad,
        first, end, 2 * block + 1, inner, stride_kept, PAD, INTERLEAVED,
        KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP,
    )  # fmt: skip
    if p_dots is not None:
        pairs = tl.load(p_pairs + rows, mask=rows < end, other=0)
        tl.store(p_dots + block.to(tl.int64) * num_pairs + pairs, dots, mask=rows < end)


@triton.jit
def inner_gradient(
    p_grad, p_pairs, p_tiles, p_down, p_routing, p_kept_gate, p_kept_up, p_inner, p_gate_grad, p_up_grad, p_dots,
    most_tiles, hidden, inner, num_pairs, stride_kept, stride_we, stride_wn, stride_wk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, HALVE: tl.constexpr,
    INTERLEAVED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BY_ROWS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """From the sorted rows of the result's gradient: what is wanted of the three.

    Writes:
        p_inner: inner rows times their routing weights, for the gradient of the second matrix.
        p_gate_grad, p_up_grad: gradients of the first product.
        p_dots: (blocks, S) sums over a block of the columns of inner times its gradient.
    """
    num_tiles = tl.load(p_tiles + 3 * most_tiles)
    blocks = tl.cdiv(inner, BN)
    if tl.program_id(0) >= num_tiles * blocks:
        return
    tile, block = tile_of_program(tl.program_id(0), num_tiles, blocks, GROUP)
    expert, first, end = rows_of_tile(p_tiles, tile)
    if HALVE and end - first <= BM // 2:
        _inner_tile(
            p_grad, p_pairs, p_down, p_routing, p_kept_gate, p_kept_up, p_inner, p_gate_grad, p_up_grad, p_dots,
            expert, first, end, block, hidden, inner, num_pairs, stride_kept, stride_we, stride_wn, stride_wk,
            BM // 2, BN, BK, PAD, INTERLEAVED, EVEN_K, EVEN_N, PRECISION, TMA, BY_ROWS,
            KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP,
        )  # fmt: skip
    else:
        _inner_tile(
            p_grad, p_pairs, p_down, p_routing, p_kept_gate, p_kept_up, p_inner, p_gate_grad, p_up_grad, p_dots,
            expert, first, end, block, hidden, inner, num_pairs, stride_kept, stride_we, stride_wn, stride_wk,
            BM, BN, BK, PAD, INTERLEAVED, EVEN_K, EVEN_N, PRECISION, TMA, BY_ROWS,
            KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP,
        )  # fmt: skip


@triton.jit
def weight_gradient(
    p_left, p_right, p_bounds, p_out, num_columns, hidden, stride_oe, stride_oc, stride_oh,
    BC: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, EVEN_C: tl.constexpr, EVEN_H: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Each expert's leftᵀ · right, (columns, hidden), over its rows; zeros for an expert without any."""
    h_blocks = tl.cdiv(hidden, BH)
    per_expert = tl.cdiv(num_columns, BC) * h_blocks
    program = tl.program_id(0)
    expert = program // per_expert
    c_block = program % per_expert // h_blocks
    h_block = program % h_blocks
    first = tl.load(p_bounds + 2 * expert)
    end = tl.load(p_bounds + 2 * expert + 1)
    columns = c_block * BC + tl.arange(0, BC)
    m_columns = columns < num_columns
    h = h_block * BH + tl.arange(0, BH)
    m_h = h < hidden
    acc = tl.zeros([BC, BH], tl.float32)
    lost = tl.zeros([BC, BH], tl.float32)
    if TMA:
        for start in range(first, end, BK):
            a = p_left.load([start, c_block * BC])
            b = p_right.load([start, h_block * BH])
            acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    else:
        rows = (first + tl.arange(0, BK)).to(tl.int64)[:, None]
        p_a = p_left + rows * num_columns + columns[None, :]
        p_b = p_right + rows * hidden + h[None, :]
        for _ in range(first, end, BK):
            a = tl.load(p_a) if EVEN_C else tl.load(p_a, mask=m_columns[None, :], other=0.0)
            b = tl.load(p_b) if EVEN_H else tl.load(p_b, mask=m_h[None, :], other=0.0)
            acc, lost = add_product(acc, lost, tl.trans(a), b, PRECISION)
            p_a += BK * num_columns
            p_b += BK * hidden
    p_o = p_out + expert.to(tl.int64) * stride_oe + columns.to(tl.int64)[:, None] * stride_oc
    p_o += h.to(tl.int64)[None, :] * stride_oh
    tl.store(p_o, acc.to(p_out.dtype.element_ty), mask=m_columns[:, None] & m_h[None, :])


@triton.jit
def bias_gradient(
    p_rows, p_pairs, p_routing, p_bounds, p_out, num_columns, top_k, stride_oe, stride_oc,
    BC: tl.constexpr, BK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Each expert's sum of rows: in expert order, or, if gathered, of their tokens times their routing weights."""
    expert = tl.program_id(1)
    first = tl.load(p_bounds + 2 * expert)
    end = tl.load(p_bounds + 2 * expert + 1)
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    m_columns = columns < num_columns
    acc = tl.zeros([BC], tl.float32)
    for start in range(first, end, BK):
        rows = start + tl.arange(0, BK)
        m_rows = rows < end
        if GATHER:
            pairs = tl.load(p_pairs + rows, mask=m_rows, other=0)
            read = pairs // top_k
            weights = tl.load(p_routing + pairs, mask=m_rows, other=0.0).to(tl.float32)
        else:
            read = rows
        p_row = p_rows + read.to(tl.int64)[:, None] * num_columns + columns[None, :]
        block = tl.load(p_row, mask=m_rows[:, None] & m_columns[None, :], other=0.0).to(tl.float32)
        if GATHER:
            block *= weights[:, None]
        acc += tl.sum(block, 0)
    p_o = p_out + expert.to(tl.int64) * stride_oe + columns * stride_oc
    tl.store(p_o, acc.to(p_out.dtype.element_ty), mask=m_columns)


@triton.jit
def routing_gradient(
    p_dots, p_ids, p_grad, p_bias, p_out, num_pairs, num_experts, hidden, top_k, blocks, stride_be, stride_bn,
    BS: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Each pair's sum over blocks, in their order, and its gradient's product with the bias; 0 for no expert's."""
    pairs = tl.program_id(0) * BS + tl.arange(0, BS)
    m_pairs = pairs < num_pairs
    ids = tl.load(p_ids + pairs, mask=m_pairs, other=-1)
    m_expert = (ids >= 0) & (ids < num_experts)
    acc = tl.zeros([BS], tl.float32)
    p_dot = p_dots + pairs
    for _ in range(blocks):
        acc += tl.load(p_dot, mask=m_expert, other=0.0)
        p_dot += num_pairs
    if p_bias is not None:
        p_row = p_grad + (pairs // top_k).to(tl.int64)[:, None] * hidden
        p_b = p_bias + ids.to(tl.int64)[:, None] * stride_be
        for start in range(0, hidden, BH):
            h = start + tl.arange(0, BH)
            mask = m_expert[:, None] & (h < hidden)[None, :]
            grad = tl.load(p_row + h[None, :], mask=mask, other=0.0).to(tl.float32)
            bias = tl.load(p_b + h[None, :] * stride_bn, mask=mask, other=0.0).to(tl.float32)
            acc += tl.sum(grad * bias, 1)
    tl.store(p_out + pairs, acc.to(p_out.dtype.element_ty), mask=m_pairs)
