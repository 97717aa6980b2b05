"""Launches of Triton kernels without Triton's own bookkeeping at each of them.

Triton looks at every argument of every launch to find the compiled kernel, 20 µs and more for the
thirty that ours have. What it looks at is kept in a key here: dtypes and 16-byte alignment of
pointers, whether an integer is 1, a multiple of 16, or beyond 32 bits.
"""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Launcher:
    """One kernel and its compiled forms.

    Args:
        kernel: of `triton.jit`, with its compile-time parameters last.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int,
        stages: int,
        device: int,
    ) -> None:
        """Launch on the current stream.

        Args:
            device: index of the current device, whose kernels are its own.
            args: tensors, descriptors, integers and None, in the order of the kernel's parameters.
            constants: its compile-time parameters, likewise.
        """
        key = (device, constants, warps, stages, *map(_kind, args))
        compiled = self._compiled.get(key)
        if compiled is not None:
            launch(compiled, grid, (*args, *constants), device)
            return
        # None in Triton's interpreter, which compiles nothing
        self._compiled[key] = self._kernel[grid](*args, *constants, num_warps=warps, num_stages=stages)


def launch(compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...], device: int) -> None:
    """Launch what Triton compiled, with all of the kernel's parameters, as its own `run` does in the end."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _kind(arg: Any) -> Any:
    """What Triton specialises on."""
    if isinstance(arg, int):
        return 1 if arg == 1 else (arg % 16 == 0, arg > 0x7FFFFFFF)
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    return arg
