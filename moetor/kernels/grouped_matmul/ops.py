"""The two products as operators, each of which chooses how to run when it runs.

Not while it is traced: only then are addresses known, and inductor hands over other strides than
those that were traced (a transposed operand made contiguous has rows of any length).
"""

import torch
from torch import Tensor

from ..library import define
from . import fallback, native


def _grouped_matmul(x: Tensor, w: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if native.can_run(x, w, dtype):
        return native.grouped_matmul(x, w, ends)
    return fallback.grouped_matmul(x, w, ends, dtype)


def _weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if grad.dtype != x.dtype:  # fp16: the gradient of fp32 rows meets fp16 inputs
        both = torch.promote_types(grad.dtype, x.dtype)
        grad, x = grad.to(both), x.to(both)
    if native.can_run_gradient(grad, x, dtype):
        return native.weight_gradient(grad, x, ends)
    return fallback.weight_gradient(grad, x, ends, dtype)


define(
    "grouped_matmul(Tensor x, Tensor w, Tensor ends, ScalarType dtype) -> Tensor",
    _grouped_matmul,
    lambda x, w, ends, dtype: x.new_empty(x.shape[0], w.shape[1], dtype=dtype),
)
define(
    "grouped_matmul_weight_gradient(Tensor grad, Tensor x, Tensor ends, ScalarType dtype) -> Tensor",
    _weight_gradient,
    lambda grad, x, ends, dtype: grad.new_empty(ends.shape[0], grad.shape[1], x.shape[1], dtype=dtype),
)
