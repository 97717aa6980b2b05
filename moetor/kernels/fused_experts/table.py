"""Tile sizes, from shapes alone: which path a call takes, and the shape of a program on it.

Measured on an H200 (Triton 3.6) with the shapes of Qwen1.5-MoE-A2.7B, Qwen3-30B-A3B and
Mixtral-8x7B, each kernel by itself, weights cold in the L2; each entry is within 5 % of the best
found for any of the shapes at the sizes that it serves, the matrix-vector ones within 9 %. Other
GPUs get the same tiles with fewer stages, or a shallower step, where their shared memory is smaller.
Where the copy engine cannot read the operands, the same tiles read them by plain loads.
"""

import functools
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """One program of a tile kernel.

    Attributes:
        BM, BN, BK: rows, columns and depth of a step; of the first product BN gate and BN up columns.
        group: row tiles that are neighbours in launch order, so that they share weights in the L2.
        warps, stages: as Triton takes them.
        halve: an expert's last tile of at most BM / 2 rows is computed as half a tile.
        tma: read weights, and sorted rows, through the copy engine where the GPU has one.
    """

    BM: int
    BN: int
    BK: int
    group: int
    warps: int
    stages: int
    halve: bool = False
    tma: bool = False

    def shared_bytes(self, matrices: int, element_size: int) -> int:
        """Shared memory of the pipelined operands, with this many weight blocks a step."""
        return (self.BM * self.BK + matrices * self.BN * self.BK) * element_size * self.stages

    def result_bytes(self, dtype: torch.dtype) -> int:
        """Shared memory through which a program of the second product stores a tile while it reads the next
        one's operands; float16's rows are fp32."""
        return self.BM * self.BN * (4 if dtype == torch.float16 else 1) if self.tma else 0


@dataclass(frozen=True, slots=True)
class Vector:
    """One program of a matrix-vector kernel: BN rows of a matrix, BK columns a step.

    Attributes:
        by_pair: of the second product: one pair's row a program, added by a launch of its own; else a
            program goes over all pairs of a token.
    """

    BN: int
    BK: int
    warps: int
    stages: int
    by_pair: bool = False


# The most tokens that go through the matrix-vector kernels: at 8, tiles are as fast.
FEW_TOKENS = 4

# By rows of a tile.
_UP = {
    16: Tile(16, 64, 128, 1, 4, 5),
    32: Tile(32, 128, 128, 1, 8, 3),
    64: Tile(64, 128, 64, 8, 4, 4, tma=True),
    128: Tile(128, 128, 64, 16, 8, 4, halve=True, tma=True),
}
_DOWN = {
    16: Tile(16, 128, 128, 1, 4, 3),
    32: Tile(32, 128, 64, 1, 4, 3),
    64: Tile(64, 256, 64, 8, 8, 4, tma=True),
    128: Tile(128, 256, 64, 8, 8, 4, tma=True),
}
# Of the gradient of the rows between the products.
_INNER_GRADIENT = {
    16: Tile(16, 64, 128, 1, 4, 3),
    32: Tile(32, 128, 64, 1, 4, 3),
    64: Tile(64, 128, 64, 8, 4, 4, tma=True),
    128: Tile(128, 128, 64, 8, 8, 4, halve=True, tma=True),
}
# Of the gradients of weights: BM rows and BN columns of a matrix, BK rows of its expert a step.
_WEIGHT_GRADIENT = {
    16: Tile(128, 128, 16, 1, 8, 4, tma=True),
    32: Tile(128, 128, 32, 1, 8, 4, tma=True),
    64: Tile(128, 256, 64, 1, 8, 4, tma=True),
    128: Tile(128, 256, 64, 1, 8, 4, tma=True),
}
# No tensor cores with exact fp32: small tiles that stay in registers.
_FP32 = Tile(32, 32, 32, 4, 4, 2, halve=True)

# (one token, two to FEW_TOKENS)
_UP_VECTOR = (Vector(4, 128, 1, 4), Vector(8, 256, 2, 3))
_DOWN_VECTOR = (Vector(4, 512, 2, 3), Vector(8, 256, 2, 4))
# Where columns are contiguous: gpt-oss-120b's shape.
_UP_COLUMN_VECTOR = (Vector(32, 128, 4, 3), Vector(64, 64, 4, 3))
_DOWN_COLUMN_VECTOR = (Vector(16, 128, 2, 4, by_pair=True), Vector(64, 128, 8, 3, by_pair=True))


def tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, shared_limit: int) -> tuple[Tile, Tile]:
    """Tiles of the two products, of as many rows each, by the average rows of an expert: routing that
    is skewed costs more tiles of the same kind, not another kind.

    Args:
        shared_limit: bytes of shared memory that a block may have.
    """
    if dtype == torch.float32:
        return _FP32, _FP32
    size = _height(num_pairs, num_experts)
    return fit(_UP[size], 2, dtype, shared_limit), _down(size, dtype, shared_limit)


def backward_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, shared_limit: int) -> tuple[Tile, Tile, Tile]:
    """Tiles for the gradients of the rows between the products, of x, and of weights.

    The first two are of as many rows each, and the steps of the last one divide what `row_multiple`
    gives for the first.
    """
    if dtype == torch.float32:
        return _FP32, _FP32, replace(_FP32, BK=16, halve=False)
    size = _height(num_pairs, num_experts)
    inner = fit(_INNER_GRADIENT[size], 1, dtype, shared_limit)
    return inner, _down(size, dtype, shared_limit), fit(_WEIGHT_GRADIENT[size], 1, dtype, shared_limit)


def row_multiple(tile: Tile) -> int:
    """What each expert's first row must be a multiple of, for its last tile to reach the next multiple."""
    return min(64, tile.BM // 2 if tile.halve else tile.BM)


def _height(num_pairs: int, num_experts: int) -> int:
    rows = num_pairs / num_experts
    return 16 if rows <= 12 else 32 if rows <= 24 else 64 if rows <= 48 else 128


def _down(size: int, dtype: torch.dtype, shared_limit: int) -> Tile:
    down = _DOWN[size]
    while down.result_bytes(dtype) > shared_limit // 3:
        down = replace(down, BN=down.BN // 2)
    return fit(down, 1, dtype, shared_limit - down.result_bytes(dtype))


@functools.cache
def fit(tile: Tile, matrices: int, dtype: torch.dtype, shared_limit: int) -> Tile:
    """The tile, with fewer stages and then narrower steps until its operands fit."""
    while tile.shared_bytes(matrices, dtype.itemsize) > shared_limit:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.BK > 32:
            tile = replace(tile, BK=tile.BK // 2)
        else:
            tile = replace(tile, BN=tile.BN // 2)
    return tile


def up_vector(num_tokens: int, rows_contiguous: bool) -> Vector:
    """Program of the first matrix-vector product; matrices' rows, or else columns, are contiguous."""
    return (_UP_VECTOR if rows_contiguous else _UP_COLUMN_VECTOR)[num_tokens > 1]


def down_vector(num_tokens: int, rows_contiguous: bool) -> Vector:
    """Program of the second."""
    return (_DOWN_VECTOR if rows_contiguous else _DOWN_COLUMN_VECTOR)[num_tokens > 1]
