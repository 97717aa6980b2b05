"""Gate and up columns of rows in memory: the first products that are kept, and their gradients.

They lie as the columns of the weights do: interleaved, or each half by itself.
"""

import triton
import triton.language as tl


@triton.jit
def load_halves(
    p_gate, p_up, o_rows, m_rows, block, inner, BN: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """(BM, BN) gate and up columns of a block, in fp32; zero outside. Without a gate both are the same.

    Args:
        o_rows: (BM,) int64, where each row begins.
    """
    if INTERLEAVED:
        BM: tl.constexpr = o_rows.shape[0]
        columns = 2 * block * BN + tl.arange(0, 2 * BN)
        mask = m_rows[:, None] & (columns < 2 * inner)[None, :]
        both = tl.load(p_gate + o_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, [BM, BN, 2]))
    else:
        columns = block * BN + tl.arange(0, BN)
        mask = m_rows[:, None] & (columns < inner)[None, :]
        offsets = o_rows[:, None] + columns[None, :]
        gate = tl.load(p_gate + offsets, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(p_up + offsets, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def store_halves(p_gate, p_up, o_rows, m_rows, block, inner, gate, up, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store what `load_halves` loads."""
    BM: tl.constexpr = gate.shape[0]
    BN: tl.constexpr = gate.shape[1]
    if INTERLEAVED:
        columns = 2 * block * BN + tl.arange(0, 2 * BN)
        mask = m_rows[:, None] & (columns < 2 * inner)[None, :]
        both = tl.reshape(tl.join(gate, up), [BM, 2 * BN])
        tl.store(p_gate + o_rows[:, None] + columns[None, :], both.to(p_gate.dtype.element_ty), mask=mask)
    else:
        columns = block * BN + tl.arange(0, BN)
        mask = m_rows[:, None] & (columns < inner)[None, :]
        offsets = o_rows[:, None] + columns[None, :]
        tl.store(p_gate + offsets, gate.to(p_gate.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(p_up + offsets, up.to(p_up.dtype.element_ty), mask=mask)


@triton.jit
def within_range(block, p_kept):
    """The block, where float16 is kept no larger than float16 goes: the derivative at infinity would be NaN."""
    if p_kept.dtype.element_ty == tl.float16:
        block = tl.maximum(block, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        block = tl.minimum(block, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return block
