"""Which rows and columns a program of the tile kernels works on."""

import triton
import triton.language as tl


@triton.jit
def sorted_tile(p_ends, tile, num_experts, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """The expert of row tile `tile`, its first row and the end of the expert's rows; expert = E past the last."""
    experts = tl.arange(0, EXPERTS)
    held = experts < num_experts
    ends = tl.load(p_ends + experts, mask=held, other=0)
    starts = tl.load(p_ends + experts - 1, mask=held & (experts > 0), other=0)
    tiles = tl.where(held, (ends - starts + BM - 1) // BM, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((held & (upto <= tile)).to(tl.int32))
    own = experts == expert
    first = tl.sum(tl.where(own, starts + (tile - (upto - tiles)) * BM, 0))
    end = tl.sum(tl.where(own, ends, 0))
    return expert, first, end


@triton.jit
def tile_of_program(num_tiles, blocks, GROUP: tl.constexpr):
    """(row tile, column block) in groups of GROUP row tiles, so that they share weights in the L2."""
    program = tl.program_id(0)
    per_group = GROUP * blocks
    first = program // per_group * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    return first + program % per_group % size, program % per_group // size
