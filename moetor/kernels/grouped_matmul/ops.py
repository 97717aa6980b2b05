"""The two products as operators, each of which chooses how to run when it runs.

Not while it is traced: only then are addresses known, and inductor hands over other strides than
those that were traced (a transposed operand made contiguous has rows of any length). What can be
known while tracing is that the loop is certain; it is an operator of its own, as it syncs.
"""

import torch
from torch import Tensor

from ...core.errors import BackendRefused
from ..library import define
from . import fallback, native
from .gradient import GroupedMatmul


def _grouped_matmul(x: Tensor, w: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if native.can_run(x, w, dtype):
        return native.grouped_matmul(x, w, ends)
    _refuse_capture(x)
    return fallback.grouped_matmul(x, w, ends, dtype)


def _weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if grad.dtype != x.dtype:  # fp16: the gradient of fp32 rows meets fp16 inputs
        both = torch.promote_types(grad.dtype, x.dtype)
        grad, x = grad.to(both), x.to(both)
    if native.can_run_gradient(grad, x, dtype):
        return native.weight_gradient(grad, x, ends)
    _refuse_capture(x)
    return fallback.weight_gradient(grad, x, ends, dtype)


def _refuse_capture(x: Tensor) -> None:
    """For what only addresses tell: bfloat16 weights of the right sizes that start between 16 bytes."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise BackendRefused(
            "grouped_mm loops on the host for these operands, which a CUDA graph cannot capture; it needs weights"
            " that start at multiples of 16 bytes"
        )


for suffix, syncs in (("", False), ("_loop", True)):
    define(
        f"grouped_matmul{suffix}(Tensor x, Tensor w, Tensor ends, ScalarType dtype) -> Tensor",
        fallback.grouped_matmul if syncs else _grouped_matmul,
        lambda x, w, ends, dtype: x.new_empty(x.shape[0], w.shape[1], dtype=dtype),
        gradient=GroupedMatmul,
        syncs=syncs,
    )
    define(
        f"grouped_matmul_weight_gradient{suffix}(Tensor grad, Tensor x, Tensor ends, ScalarType dtype) -> Tensor",
        _weight_gradient,
        lambda grad, x, ends, dtype: grad.new_empty(ends.shape[0], grad.shape[1], x.shape[1], dtype=dtype),
        syncs=syncs,
    )
