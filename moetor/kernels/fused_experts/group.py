"""Pairs in expert order, from their ids: no sort of torch's, no host sync, no atomics on the order.

Within an expert, pairs keep their order. Ids outside [0, E) are left out. Up to `ONE_LAUNCH` pairs
each program looks at all of them for its expert; beyond, counts by chunks tell where to begin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launcher

ONE_LAUNCH = 8192
CHUNK = 1024
# Chunks that one program of the last launch walks.
WALK = 8


@triton.jit
def _group(p_ids, p_pairs, p_ends, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    own = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(p_ids + offsets, mask=offsets < num_pairs, other=-1)
        before += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32))
        own += tl.sum((ids == expert).to(tl.int32))
    tl.store(p_ends + expert, before + own)
    row = before
    for start in range(0, num_pairs, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(p_ids + offsets, mask=offsets < num_pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        rows = row + tl.cumsum(mine, 0) - mine
        tl.store(p_pairs + rows, offsets, mask=mine > 0)
        row += tl.sum(mine)


@triton.jit
def _count(p_ids, p_counts, num_pairs, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Counts of each expert in one chunk, (chunks, E)."""
    chunk = tl.program_id(0)
    offsets = chunk * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(p_ids + offsets, mask=offsets < num_pairs, other=-1)
    counted = (ids >= 0) & (ids < num_experts)
    counts = tl.histogram(tl.where(counted, ids, 0).to(tl.int32), EXPERTS, mask=counted)
    experts = tl.arange(0, EXPERTS)
    tl.store(p_counts + chunk * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit
def _accumulate(p_counts, p_totals, num_experts, num_chunks, CHUNKS: tl.constexpr):
    """Counts of one expert become the number of its pairs in earlier chunks; its total beside."""
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        p_count = p_counts + chunks.to(tl.int64) * num_experts + expert
        counts = tl.load(p_count, mask=chunks < num_chunks, other=0)
        tl.store(p_count, total + tl.cumsum(counts, 0) - counts, mask=chunks < num_chunks)
        total += tl.sum(counts)
    tl.store(p_totals + expert, total)


@triton.jit
def _scatter(
    p_ids, p_counts, p_totals, p_pairs, p_ends, num_pairs, num_experts, num_chunks,
    BLOCK: tl.constexpr, WALK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.program_id(1) * WALK
    experts = tl.arange(0, EXPERTS)
    totals = tl.load(p_totals + experts, mask=experts < num_experts, other=0)
    start = tl.sum(tl.where(experts < expert, totals, 0))
    if first == 0:
        tl.store(p_ends + expert, start + tl.sum(tl.where(experts == expert, totals, 0)))
    row = start + tl.load(p_counts + first.to(tl.int64) * num_experts + expert)
    for chunk in range(first, tl.minimum(first + WALK, num_chunks)):
        offsets = chunk * BLOCK + tl.arange(0, BLOCK)
        ids = tl.load(p_ids + offsets, mask=offsets < num_pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        rows = row + tl.cumsum(mine, 0) - mine
        tl.store(p_pairs + rows, offsets, mask=mine > 0)
        row += tl.sum(mine)


_group_launch, _count_launch = Launcher(_group), Launcher(_count)
_accumulate_launch, _scatter_launch = Launcher(_accumulate), Launcher(_scatter)


def group_pairs(ids_S: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert.

    Args:
        ids_S: (S,) integer, contiguous.

    Returns:
        pairs_S: (S,) int32; the first ends_E[-1] are the pairs in expert order, the rest is not written.
        ends_E: (E,) int32, one past the last row of each expert.
    """
    S = ids_S.shape[0]
    pairs_S = torch.empty(S, dtype=torch.int32, device=ids_S.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=ids_S.device)
    device = ids_S.device.index
    if S <= ONE_LAUNCH:
        block = min(1024, max(32, triton.next_power_of_2(S)))
        _group_launch((num_experts, 1, 1), (ids_S, pairs_S, ends_E, S), (block,), 4, 3, device)
        return pairs_S, ends_E
    chunks = triton.cdiv(S, CHUNK)
    counts = torch.empty(chunks, num_experts, dtype=torch.int32, device=ids_S.device)
    totals = torch.empty_like(ends_E)
    experts = triton.next_power_of_2(num_experts)
    _count_launch((chunks, 1, 1), (ids_S, counts, S, num_experts), (CHUNK, experts), 4, 3, device)
    _accumulate_launch((num_experts, 1, 1), (counts, totals, num_experts, chunks), (128,), 4, 3, device)
    _scatter_launch(
        (num_experts, triton.cdiv(chunks, WALK), 1),
        (ids_S, counts, totals, pairs_S, ends_E, S, num_experts, chunks),
        (CHUNK, WALK, experts),
        4,
        3,
        device,
    )
    return pairs_S, ends_E
