"""Rows sorted by expert times each expert's matrix, with gradients.

Letters: S rows, E experts, N output and K input size. Rows past ends_E[-1] belong to no expert:
what they hold on return is not defined, in the result and in the gradient of x.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ops as _ops  # noqa: F401  registers the operators

__all__ = ["grouped_matmul", "weight_gradient"]


def grouped_matmul(x_SK: Tensor, w_ENK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Row s of expert e: x_SK[s] · w_ENK[e]ᵀ, (S, N) in `dtype`.

    PyTorch's grouped product where it takes the operands (no host sync), else a loop over the
    experts, which takes every dtype, stride and alignment.

    Args:
        x_SK: (S, K), rows of an expert adjacent, experts in order.
        w_ENK: (E, N, K), any strides.
        ends_E: (E,) int32, one past the last row of each expert.

    >>> x, w = torch.tensor([[1.0], [2.0]]), torch.tensor([[[10.0]], [[20.0]]])
    >>> grouped_matmul(x, w, torch.tensor([1, 2], dtype=torch.int32), torch.float32).tolist()
    [[10.0], [40.0]]
    """
    grad = torch.is_grad_enabled() and (x_SK.requires_grad or w_ENK.requires_grad)
    run = _GroupedMatmul.apply if grad else torch.ops.moetor.grouped_matmul
    out: Tensor = run(x_SK, w_ENK, ends_E, dtype)
    return out


def weight_gradient(grad_SN: Tensor, x_SK: Tensor, ends_E: Tensor, w_ENK: Tensor) -> Tensor:
    """Expert e: Σ over its rows of grad_SN[s]ᵀ x_SK[s], like w_ENK (E, N, K); zeros without rows.

    It is laid out as the weights are, so that a transposed parameter gets its gradient uncopied.
    """
    if w_ENK.stride(-1) != 1 and w_ENK.stride(-2) == 1:
        return weight_gradient(x_SK, grad_SN, ends_E, w_ENK.transpose(1, 2)).transpose(1, 2)
    out: Tensor = torch.ops.moetor.grouped_matmul_weight_gradient(grad_SN, x_SK, ends_E, w_ENK.dtype)
    return out


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_ENK, ends_E, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_SK if ctx.needs_input_grad[1] else None, w_ENK, ends_E)
        ctx.x_dtype = x_SK.dtype
        return torch.ops.moetor.grouped_matmul(x_SK, w_ENK, ends_E, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SN):  # type: ignore[no-untyped-def]
        x_SK, w_ENK, ends_E = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.moetor.grouped_matmul(grad_SN, w_ENK.transpose(1, 2), ends_E, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            grad_w = weight_gradient(grad_SN, x_SK, ends_E, w_ENK)
        return grad_x, grad_w, None, None
