"""A call's tokens into the buffer that the kernel reads: one launch."""

import triton
import triton.language as tl

from ..deepgemm_experts.around import quantize_groups


@triton.jit
def fill(
    p_x, p_ids, p_routing, p_to, p_scale, p_to_ids, p_to_routing, num_experts, hidden, top_k, stride_xt, stride_xh,
    stride_to, stride_scale, stride_ids, stride_routing,
    GROUPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """e4m3 with a scale for each 128 columns, ids with -1 for no expert, and weights in fp32."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    m_columns = columns < hidden
    x = tl.load(p_x + token * stride_xt + columns * stride_xh, mask=m_columns, other=0.0).to(tl.float32)
    q, scale = quantize_groups(x, p_to.dtype.element_ty, False)
    tl.store(p_to + token * stride_to + columns, q, mask=m_columns)
    tl.store(p_scale + token * stride_scale + groups, scale, mask=groups * 128 < hidden)
    if tl.program_id(1) == 0:
        slots = tl.arange(0, SLOTS)
        m_slots = slots < top_k
        ids = tl.load(p_ids + token * top_k + slots, mask=m_slots, other=-1).to(tl.int64)
        has_expert = (ids >= 0) & (ids < num_experts)
        tl.store(p_to_ids + token * stride_ids + slots, tl.where(has_expert, ids, -1), mask=m_slots)
        weights = tl.load(p_routing + token * top_k + slots, mask=m_slots, other=0.0).to(tl.float32)
        tl.store(p_to_routing + token * stride_routing + slots, tl.where(has_expert, weights, 0.0), mask=m_slots)
