"""Few tokens: each pair's matrices as matrix-vector products, without putting the pairs in order.

At one token all of the time goes into reading the weights of K experts once. Each program reads
some rows of one matrix; the second product goes over a token's K experts itself and adds them in
slot order, so two launches do it all. Where its columns are contiguous, programs are wider and would
be too few: there it runs a pair a program, as if each pair were a token with one expert.
"""

import triton
import triton.language as tl

from .gate import apply_gate


@triton.jit
def up_vector(
    p_x, p_ids, p_gate, p_up, p_gate_bias, p_up_bias, p_inner,
    num_experts, hidden, inner, top_k,
    stride_xt, stride_xh, stride_we, stride_wn, stride_wk, o_up, stride_be, stride_bn, o_up_bias,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    expert = tl.load(p_ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    m_columns = columns < inner
    k = tl.arange(0, BK)
    p_a = p_x + (pair // top_k).to(tl.int64) * stride_xt + k * stride_xh
    if INTERLEAVED:
        # gate and up columns are neighbours in memory: read as they lie, told apart at the end
        stored = tl.program_id(0) * (2 * BN) + tl.arange(0, 2 * BN)
        m_stored = stored < 2 * inner
        p_w = p_gate + expert * stride_we + stored.to(tl.int64)[:, None] * o_up + k[None, :] * stride_wk
        acc = tl.zeros([2 * BN, BK], tl.float32)
        for start in tl.range(0, hidden, BK, num_stages=STAGES):
            m_k = start + k < hidden
            m_w = m_stored[:, None] if EVEN_K else m_stored[:, None] & m_k[None, :]
            a = tl.load(p_a + start * stride_xh) if EVEN_K else tl.load(p_a + start * stride_xh, mask=m_k, other=0.0)
            w = tl.load(p_w + start * stride_wk, mask=m_w, other=0.0)
            acc += w.to(tl.float32) * a.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(tl.sum(acc, 1), [BN, 2]))
    else:
        o_w = expert * stride_we + columns[:, None] * stride_wn + k[None, :] * stride_wk
        p_g = p_gate + o_w
        p_u = p_up + o_up + o_w
        gate_acc = tl.zeros([BN, BK], tl.float32)
        up_acc = tl.zeros([BN, BK], tl.float32)
        for start in tl.range(0, hidden, BK, num_stages=STAGES):
            m_k = start + k < hidden
            m_w = m_columns[:, None] if EVEN_K else m_columns[:, None] & m_k[None, :]
            a = tl.load(p_a + start * stride_xh) if EVEN_K else tl.load(p_a + start * stride_xh, mask=m_k, other=0.0)
            a = a.to(tl.float32)
            g = tl.load(p_g + start * stride_wk, mask=m_w, other=0.0)
            gate_acc += g.to(tl.float32) * a[None, :]
            if GATED:
                u = tl.load(p_u + start * stride_wk, mask=m_w, other=0.0)
                up_acc += u.to(tl.float32) * a[None, :]
        gate = tl.sum(gate_acc, 1)
        up = tl.sum(up_acc, 1)
    if HAS_BIAS:
        o_b = expert * stride_be + columns * stride_bn
        gate += tl.load(p_gate_bias + o_b, mask=m_columns, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(p_up_bias + o_up_bias + o_b, mask=m_columns, other=0.0).to(tl.float32)
    out = apply_gate(gate, up, KIND, GATED, ALPHA, LIMIT, LIMIT_AFTER, UP_OFFSET, GATE_CAP, UP_CAP)
    tl.store(p_inner + pair.to(tl.int64) * inner + columns, out.to(p_inner.dtype.element_ty), mask=m_columns)


@triton.jit
def down_vector(
    p_inner, p_ids, p_down, p_bias, p_routing, p_out,
    num_experts, hidden, inner,
    stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    m_columns = columns < hidden
    k = tl.arange(0, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    bias = tl.zeros([BN], tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(p_ids + pair).to(tl.int64)
        if (expert >= 0) & (expert < num_experts):
            weight = tl.load(p_routing + pair).to(tl.float32)
            p_a = p_inner + pair * inner + k
            p_w = p_down + expert * stride_we + columns[:, None] * stride_wn + k[None, :] * stride_wk
            for start in tl.range(0, inner, BK, num_stages=STAGES):
                m_k = start + k < inner
                m_w = m_columns[:, None] if EVEN_K else m_columns[:, None] & m_k[None, :]
                a = (tl.load(p_a + start) if EVEN_K else tl.load(p_a + start, mask=m_k, other=0.0)).to(tl.float32)
                w = tl.load(p_w + start * stride_wk, mask=m_w, other=0.0)
                acc += w.to(tl.float32) * (a * weight)[None, :]
            if HAS_BIAS:
                p_b = p_bias + expert * stride_be + columns * stride_bn
                bias += weight * tl.load(p_b, mask=m_columns, other=0.0).to(tl.float32)
    out = tl.sum(acc, 1) + bias
    tl.store(p_out + token * hidden + columns, out.to(p_out.dtype.element_ty), mask=m_columns)
