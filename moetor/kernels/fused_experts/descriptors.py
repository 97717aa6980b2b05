"""Tensor descriptors: how the copy engine of SM90 and newer GPUs finds blocks of the operands."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .operands import Matrices
from .table import Tile


@dataclass(frozen=True, slots=True)
class Blocks:
    """A view of a tensor's memory, read by blocks.

    Attributes:
        offset: elements from the tensor's first.
    """

    shape: list[int]
    strides: list[int]
    block: list[int]
    offset: int = 0

    def of(self, tensor: Tensor) -> TensorDescriptor:
        base = tensor
        if self.offset:
            base = torch.as_strided(tensor, self.shape, self.strides, tensor.storage_offset() + self.offset)
        return TensorDescriptor(base, self.shape, self.strides, self.block)


def blocks_of_up(up: Matrices, order: str, tile: Tile) -> tuple[str, Blocks, Blocks] | None:
    """The first product's order, and blocks of its gate and up columns; None: it takes plain loads.

    Where one tensor holds both, one block brings gate and up columns together. Concatenated
    columns of a transposed tensor are as two tensors to it.
    """
    E, H = up.first.shape[0], up.first.shape[2]
    outer, column, along = up.strides
    if order == "interleaved":
        if not _takes(up.first, 0, (outer, up.offset, along)):
            return None
        both = _blocks((E, 2 * up.N, H), (outer, up.offset, along), 2 * tile.BN, tile.BK)
        return order, both, both
    if not _takes(up.first, 0, up.strides) or not _takes(up.second, up.offset, up.strides):
        return None
    if order == "stacked" and along == 1:
        both = Blocks([E, 2, up.N, H], [outer, up.offset, column, 1], [1, 2, tile.BN, tile.BK])
        return order, both, both
    gate = _blocks((E, up.N, H), up.strides, tile.BN, tile.BK)
    if order == "single":
        return order, gate, gate
    return "apart", gate, _blocks((E, up.N, H), up.strides, tile.BN, tile.BK, up.offset)


def blocks_of_product(
    matrices: Tensor, shape: tuple[int, int, int], strides: tuple[int, int, int], rows: int, tile: Tile
) -> tuple[Blocks, Blocks] | None:
    """Blocks of sorted rows (rows, depth) and of the matrices that they meet; None: plain loads.

    Args:
        shape, strides: of the matrices, as experts, columns of the product, depth.
    """
    of_rows = blocks_of_rows(matrices, rows, shape[2], tile.BM, tile.BK)
    of_matrices = blocks_of_matrices(matrices, shape, strides, tile)
    return (of_rows, of_matrices) if of_rows and of_matrices else None


def blocks_of_matrices(
    matrices: Tensor, shape: tuple[int, int, int], strides: tuple[int, int, int], tile: Tile
) -> Blocks | None:
    return _blocks(shape, strides, tile.BN, tile.BK) if _takes(matrices, 0, strides) else None


def blocks_of_rows(like: Tensor, rows: int, width: int, height: int, columns: int) -> Blocks | None:
    """Blocks (height, columns) of sorted rows (rows, width), a tensor of our own of this dtype and device."""
    if not like.is_cuda or width * like.element_size() % 16 or not _has_copy_engine(like.device.index):
        return None
    return Blocks([rows, width], [width, 1], [height, columns])


def _takes(tensor: Tensor, offset: int, strides: tuple[int, ...]) -> bool:
    """Whether the copy engine can read it: one stride along the matrix of 1, all else on 16 bytes."""
    size = tensor.element_size()
    return (
        tensor.is_cuda
        and 1 in strides[1:]
        and all(stride == 1 or stride * size % 16 == 0 for stride in strides)
        and (tensor.data_ptr() + offset * size) % 16 == 0
        and _has_copy_engine(tensor.device.index)
    )


def _blocks(
    shape: tuple[int, int, int], strides: tuple[int, int, int], columns: int, depth: int, offset: int = 0
) -> Blocks:
    """Blocks of `columns` by `depth` of each matrix, in the order of storage."""
    if strides[2] == 1:
        return Blocks(list(shape), list(strides), [1, columns, depth], offset)
    E, N, K = shape
    outer, column, along = strides
    return Blocks([E, K, N], [outer, along, column], [1, depth, columns], offset)


@functools.cache
def _has_copy_engine(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
