"""Which rows and columns a program of the tile kernels works on."""

import triton
import triton.language as tl


@triton.jit
def write_tiles(
    p_tiles, p_bounds, counts, expert, num_experts, most_tiles,
    BM: tl.constexpr, PAD: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One expert's part of the list of tiles: (expert, first row, end of its rows), and the length at 3 · most_tiles.

    Args:
        p_bounds: (first row, end) of every expert.
        counts: (EXPERTS,) rows of every expert.
        PAD: every expert's first row is a multiple of it.

    Returns:
        Its first row.
    """
    experts = tl.arange(0, EXPERTS)
    tiles = (counts + BM - 1) // BM
    row = tl.sum(tl.where(experts < expert, (counts + PAD - 1) // PAD * PAD, 0))
    first = tl.sum(tl.where(experts < expert, tiles, 0))
    own = tl.sum(tl.where(experts == expert, tiles, 0))
    end = row + tl.sum(tl.where(experts == expert, counts, 0))
    for start in range(0, own, 32):
        tile = start + tl.arange(0, 32)
        p_tile = p_tiles + 3 * (first + tile)
        tl.store(p_tile, expert + tl.zeros_like(tile), mask=tile < own)
        tl.store(p_tile + 1, row + tile * BM, mask=tile < own)
        tl.store(p_tile + 2, end + tl.zeros_like(tile), mask=tile < own)
    if expert == num_experts - 1:
        tl.store(p_tiles + 3 * most_tiles, first + own)
    tl.store(p_bounds + 2 * expert, row)
    tl.store(p_bounds + 2 * expert + 1, end)
    return row


@triton.jit
def tile_of_program(program, num_tiles, blocks, GROUP: tl.constexpr):
    """(row tile, column block) in groups of GROUP row tiles, so that they share weights in the L2."""
    per_group = GROUP * blocks
    first = program // per_group * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    return first + program % per_group % size, program % per_group // size


@triton.jit
def rows_of_tile(p_tiles, tile):
    """The expert of a row tile, its first row, and the end of the expert's rows."""
    p_tile = p_tiles + 3 * tile
    return tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
