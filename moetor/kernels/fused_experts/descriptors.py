"""Tensor descriptors: how the copy engine of SM90 and newer GPUs finds blocks of the operands."""

import functools

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .operands import Matrices
from .table import Tile


def describe_up(up: Matrices, order: str, tile: Tile) -> tuple[str, TensorDescriptor, TensorDescriptor] | None:
    """The first product's order, and descriptors of its gate and up columns; None: it takes plain loads.

    Where one tensor holds both, one descriptor brings gate and up columns together. Concatenated
    columns of a transposed tensor are as two tensors to it.
    """
    E, H = up.first.shape[0], up.first.shape[2]
    outer, column, along = up.strides
    if order == "interleaved":
        if not _takes(up.first, 0, (outer, up.offset, along)):
            return None
        both = _blocks(up.first, 0, (E, 2 * up.N, H), (outer, up.offset, along), 2 * tile.BN, tile.BK)
        return order, both, both
    if not _takes(up.first, 0, up.strides) or not _takes(up.second, up.offset, up.strides):
        return None
    if order == "stacked" and along == 1:
        pairs = torch.as_strided(up.first, (E, 2, up.N, H), (outer, up.offset, column, 1), up.first.storage_offset())
        both = TensorDescriptor(pairs, list(pairs.shape), list(pairs.stride()), [1, 2, tile.BN, tile.BK])
        return order, both, both
    gate = _blocks(up.first, 0, (E, up.N, H), up.strides, tile.BN, tile.BK)
    if order == "single":
        return order, gate, gate
    return "apart", gate, _blocks(up.second, up.offset, (E, up.N, H), up.strides, tile.BN, tile.BK)


def describe_down(inner: Tensor, down: Matrices, tile: Tile) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Descriptors of the sorted inner rows and of the second product's matrices; None: it takes plain loads."""
    if not _takes(down.first, 0, down.strides) or inner.stride(0) * inner.element_size() % 16:
        return None
    rows = TensorDescriptor(inner, list(inner.shape), list(inner.stride()), [tile.BM, tile.BK])
    return rows, _blocks(down.first, 0, tuple(down.first.shape), down.strides, tile.BN, tile.BK)


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
    tensor: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, int, int], columns: int, depth: int
) -> TensorDescriptor:
    """Blocks of `columns` by `depth` of each matrix, in the order of storage."""
    view = torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)
    if strides[2] == 1:
        return TensorDescriptor(view, list(shape), list(strides), [1, columns, depth])
    E, N, K = shape
    outer, column, along = strides
    return TensorDescriptor(view, [E, K, N], [outer, along, column], [1, depth, columns])


@functools.cache
def _has_copy_engine(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
