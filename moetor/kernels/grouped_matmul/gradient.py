"""The product as a function with a gradient, and which operator each product is."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..library import run
from . import native


def product(x_SK: Tensor, w_ENK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """See the package; without a gradient."""
    # only tracing has a use for the difference: a CUDA graph must leave the loop out
    loops = torch.compiler.is_compiling() and not native.may_run(x_SK, w_ENK, dtype)
    ops = torch.ops.moetor
    out: Tensor = run((ops.grouped_matmul_loop if loops else ops.grouped_matmul).default, x_SK, w_ENK, ends_E, dtype)
    return out


def weight_gradient(grad_SN: Tensor, x_SK: Tensor, ends_E: Tensor, w_ENK: Tensor) -> Tensor:
    """Expert e: Σ over its rows of grad_SN[s]ᵀ x_SK[s], like w_ENK (E, N, K); zeros without rows.

    It is laid out as the weights are, so that a transposed parameter gets its gradient uncopied.
    """
    if w_ENK.stride(-1) != 1 and w_ENK.stride(-2) == 1:
        return weight_gradient(x_SK, grad_SN, ends_E, w_ENK.transpose(1, 2)).transpose(1, 2)
    loops = torch.compiler.is_compiling() and not native.may_run_gradient(grad_SN, x_SK, w_ENK.dtype)
    ops = torch.ops.moetor
    op = ops.grouped_matmul_weight_gradient_loop if loops else ops.grouped_matmul_weight_gradient
    out: Tensor = run(op.default, grad_SN, x_SK, ends_E, w_ENK.dtype)
    return out


class GroupedMatmul(torch.autograd.Function):
    """`product` with gradients of x and w."""

    @staticmethod
    def forward(x_SK: Tensor, w_ENK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
        return product(x_SK, w_ENK, ends_E, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_SK, w_ENK, ends_E, _ = inputs
        ctx.save_for_backward(x_SK if ctx.needs_input_grad[1] else None, w_ENK, ends_E)
        ctx.x_dtype = x_SK.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        x_SK, w_ENK, ends_E = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad_SN, w_ENK.transpose(1, 2), ends_E, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            grad_w = weight_gradient(grad_SN, x_SK, ends_E, w_ENK)
        return grad_x, grad_w, None, None
