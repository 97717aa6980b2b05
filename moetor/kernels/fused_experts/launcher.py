"""Launches of Triton kernels without Triton's own bookkeeping at each of them.

Triton looks at every argument of every launch to find the compiled kernel, 20 µs and more for the
thirty that ours have. A `Launcher` looks by a key of its own: dtypes and 16-byte alignment of
pointers, whether an integer is 1, a multiple of 16, or beyond 32 bits. A `Step` of a plan has
looked once, for a shape, and then takes only the addresses.
"""

from dataclasses import dataclass
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

    def launch(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[Any, ...], warps: int, stages: int,
        device: int,
    ) -> Any:  # fmt: skip
        """Launch on the current stream, and return what was launched: None in Triton's interpreter.

        Args:
            args: tensors, descriptors, integers and None, in the order of the kernel's parameters.
            constants: its compile-time parameters, likewise.
            device: index of the current device, whose kernels are its own.
        """
        key = (device, constants, warps, stages, *map(_kind, args))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel[grid](*args, *constants, num_warps=warps, num_stages=stages)
            self._compiled[key] = compiled
        else:
            _run(compiled, grid, (*args, *constants), device)
        return compiled


@dataclass(slots=True)
class Step:
    """One launch of a plan, with everything but the addresses filled in.

    Attributes:
        numbers: the kernel's integers, which follow its addresses, and its compile-time parameters.
        compiled: None until it has been launched once.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    warps: int
    stages: int
    device: int
    compiled: Any = None

    def launch(self, *addresses: Any) -> None:
        """Launch on the current stream.

        Args:
            addresses: tensors, descriptors, None, and from the second launch on plain numbers, for
                parts of a buffer.
        """
        if self.compiled is not None:
            _run(self.compiled, self.grid, (*addresses, *self.numbers, *self.constants), self.device)
            return
        args = (*addresses, *self.numbers)
        self.compiled = self.launcher.launch(self.grid, args, self.constants, self.warps, self.stages, self.device)


def _run(compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...], device: int) -> None:
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
