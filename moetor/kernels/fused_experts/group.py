"""Pairs in expert order, from their ids: no sort of torch's, no host sync, no atomics on the order.

Within an expert, pairs keep their order. Ids outside [0, E) are left out. Up to `ONE_LAUNCH` pairs
each program looks at all of them for its expert; beyond, counts by chunks tell where to begin.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launcher, Step
from .rows import write_tiles
from .sizes import cdiv, next_power_of_2

ONE_LAUNCH = 4096
# Pairs that a program of the other way ranks, by comparing all with all.
CHUNK = 128


@triton.jit
def _group(
    p_ids, p_pairs, p_tiles, p_bounds, num_pairs, num_experts, most_tiles,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(p_ids + offsets, mask=offsets < num_pairs, other=-1)
        counts += _histogram(ids, num_experts, EXPERTS)
    row = write_tiles(p_tiles, p_bounds, counts, expert, num_experts, most_tiles, BM, PAD, EXPERTS)
    for start in range(0, num_pairs, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(p_ids + offsets, mask=offsets < num_pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        rows = row + tl.cumsum(mine, 0) - mine
        tl.store(p_pairs + rows, offsets, mask=mine > 0)
        row += tl.sum(mine)


@triton.jit
def _histogram(ids, num_experts, EXPERTS: tl.constexpr):
    """(EXPERTS,) how many of the ids are each expert's; others are not counted."""
    counted = (ids >= 0) & (ids < num_experts)
    return tl.histogram(tl.where(counted, ids, 0).to(tl.int32), EXPERTS, mask=counted)


@triton.jit
def _count(p_ids, p_bases, num_pairs, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Counts of each expert in one chunk, (chunks, E)."""
    chunk = tl.program_id(0)
    offsets = chunk * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(p_ids + offsets, mask=offsets < num_pairs, other=-1)
    counts = _histogram(ids, num_experts, EXPERTS)
    experts = tl.arange(0, EXPERTS)
    tl.store(p_bases + chunk.to(tl.int64) * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit
def _total(p_counts, p_totals, num_experts, num_chunks, CHUNKS: tl.constexpr):
    """Pairs of one expert."""
    expert = tl.program_id(0)
    total = tl.zeros([CHUNKS], tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        p_count = p_counts + chunks.to(tl.int64) * num_experts + expert
        total += tl.load(p_count, mask=chunks < num_chunks, other=0)
    tl.store(p_totals + expert, tl.sum(total))


@triton.jit
def _place(
    p_bases, p_totals, p_tiles, p_bounds, num_experts, num_chunks, most_tiles,
    CHUNKS: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Counts of one expert become the row of its first pair of each chunk; its tiles beside."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    totals = tl.load(p_totals + experts, mask=experts < num_experts, other=0)
    row = write_tiles(p_tiles, p_bounds, totals, expert, num_experts, most_tiles, BM, PAD, EXPERTS)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        p_base = p_bases + chunks.to(tl.int64) * num_experts + expert
        counts = tl.load(p_base, mask=chunks < num_chunks, other=0)
        tl.store(p_base, row + tl.cumsum(counts, 0) - counts, mask=chunks < num_chunks)
        row += tl.sum(counts)


@triton.jit
def _scatter(p_ids, p_bases, p_pairs, num_pairs, num_experts, BLOCK: tl.constexpr):
    """Each pair of one chunk to its row: after those of its expert in earlier chunks, and earlier in this one."""
    chunk = tl.program_id(0)
    pairs = chunk * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(p_ids + pairs, mask=pairs < num_pairs, other=-1)
    # the same ids once more, along the other dimension
    others = chunk * BLOCK + tl.arange(0, BLOCK)
    other_ids = tl.load(p_ids + others, mask=others < num_pairs, other=-1)
    earlier = (ids[:, None] == other_ids[None, :]) & (others[None, :] < pairs[:, None])
    counted = (ids >= 0) & (ids < num_experts)
    base = tl.load(p_bases + chunk.to(tl.int64) * num_experts + ids, mask=counted, other=0)
    tl.store(p_pairs + base + tl.sum(earlier.to(tl.int32), 1), pairs, mask=counted)


_group_launcher, _count_launcher, _total_launcher = Launcher(_group), Launcher(_count), Launcher(_total)
_place_launcher, _scatter_launcher = Launcher(_place), Launcher(_scatter)


@dataclass(slots=True)
class Grouping:
    """Pairs by expert, and each expert's rows cut into tiles: the plan for a number of pairs, in one buffer.

    The buffer (int32) holds, each from a multiple of 16 bytes on:
        pairs: those of an expert, in expert order; rows in between, and at the end, are not written.
        tiles: 3N + 1 numbers: expert, first row, and end of the expert's rows, of each tile; how many
            there are, at 3N.
        bounds: first row, and end, of each expert.
        bases, totals: of the way in four launches.

    Attributes:
        most_rows: rows that there are at most, with those in between.
        most_tiles: N, the most tiles that any routing of S pairs has.
        starts: where each part of the buffer begins.
        steps: one launch, or four.

    With ids [1, 0, 1, 2, 9] of 2 experts and tiles of 1 row: pairs [1, 0, 2, -, -], tiles
    [0, 0, 1,  1, 1, 3,  1, 2, 3,  …, 3] and bounds [0, 1,  1, 3].
    """

    most_rows: int
    most_tiles: int
    starts: list[int]
    steps: list[Step]

    def run(self, ids_S: Tensor) -> tuple[Tensor, list[Any]]:
        """The buffer, and pairs, tiles and bounds: tensors when it runs for the first time, then addresses."""
        buffer = torch.empty(self.starts[-1], dtype=torch.int32, device=ids_S.device)
        if self.steps[-1].compiled is None:
            parts: list[Any] = [buffer[start:] for start in self.starts[:-1]]
        else:
            address = buffer.data_ptr()
            parts = [address + 4 * start for start in self.starts[:-1]]
        pairs, tiles, bounds, bases, totals = parts
        if len(self.steps) == 1:
            self.steps[0].launch(ids_S, pairs, tiles, bounds)
        else:
            count, total, place, scatter = self.steps
            count.launch(ids_S, bases)
            total.launch(bases, totals)
            place.launch(bases, totals, tiles, bounds)
            scatter.launch(ids_S, bases, pairs)
        return buffer, parts[:3]


def plan_grouping(S: int, E: int, tile_rows: int, device: int, pad: int = 1) -> Grouping:
    """The plan for S pairs of E experts.

    Args:
        tile_rows: most rows of a tile; a tile's rows are one expert's.
        pad: each expert's first row is a multiple of it.
    """
    most_rows = cdiv(S + min(E, S) * (pad - 1), pad) * pad
    most_tiles = cdiv(S, tile_rows) + min(E, S)
    chunks = cdiv(S, CHUNK) if S > ONE_LAUNCH else 0
    starts = [0]
    for length in (most_rows, 3 * most_tiles + 1, 2 * E, chunks * E, E if chunks else 0):
        starts.append(starts[-1] + cdiv(length, 4) * 4)
    experts = max(32, next_power_of_2(E))
    if not chunks:
        block = min(4096, max(32, next_power_of_2(S)))
        warps = 4 if block <= 1024 else 8
        constants = (block, experts, tile_rows, pad)
        steps = [Step(_group_launcher, (E, 1, 1), (S, E, most_tiles), constants, warps, 3, device)]
    else:
        steps = [
            Step(_count_launcher, (chunks, 1, 1), (S, E), (CHUNK, experts), 4, 3, device),
            Step(_total_launcher, (E, 1, 1), (E, chunks), (256,), 4, 3, device),
            Step(_place_launcher, (E, 1, 1), (E, chunks, most_tiles), (256, experts, tile_rows, pad), 4, 3, device),
            Step(_scatter_launcher, (chunks, 1, 1), (S, E), (CHUNK,), 4, 3, device),
        ]
    return Grouping(most_rows, most_tiles, starts, steps)
