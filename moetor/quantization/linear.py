"""One product with a quantised matrix, dequantised for it and forgotten: the meaning of every kernel.

Gradients reach the activations, through the dequantised matrix and as if rounding them were the
identity. Payload and scales are frozen.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.formats import FORMATS
from ..core.interface import Call
from ..core.weights import ExpertWeights, Weight
from ..kernels.matmul import matmul
from .activations import round_activations
from .matrices import dequantize


def frozen_why_not(weights: ExpertWeights, call: Call) -> str | None:
    """The reason against a call that asks for gradients of payload or scales, for every backend."""
    if call.needs_grad and any(tensor.requires_grad for weight in weights.all for tensor in weight.frozen_tensors()):
        return (
            f"gives no gradients to weights of format {weights.format}; freeze them, or dequantise them to train them"
        )
    return None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products with quantised weights are computed in, for activations of `dtype`: float32 or float64.

    Nothing between the products is rounded to a half dtype: it would move some numbers over the
    border between two of e4m3, which costs as much as bfloat16 itself does (1e-2).
    """
    return torch.promote_types(dtype, torch.float32)


def quantized_product(weight: Weight) -> Callable[[int, Tensor, torch.dtype], Tensor]:
    """(expert, x (S, K), dtype) -> (S, N): x rounded as the format says, times the expert's matrix, plus its bias.

    `dtype` is float32 or float64, see `compute_dtype`.

    >>> import torch
    >>> from moetor.core.formats import fp8
    >>> weight = Weight(torch.ones(2, 3, 4).to(torch.float8_e4m3fn), scale=torch.full((2, 1, 1), 0.5),
    ...                 format=fp8((0, 0), activations=None).name)
    >>> quantized_product(weight)(1, torch.ones(1, 4), torch.float32)
    tensor([[2., 2., 2.]])
    """
    payloads, scales, biases = weight.matrices(), weight.scales(), weight.biases()

    def product(expert: int, x_SK: Tensor, dtype: torch.dtype) -> Tensor:
        static = None if weight.activation_scale is None else weight.activation_scale[expert]
        arguments = (x_SK, payloads[expert], scales[expert], static, weight.format, dtype)
        needs_grad = torch.is_grad_enabled() and x_SK.requires_grad
        out: Tensor = _FrozenLinear.apply(*arguments) if needs_grad else _linear(*arguments)
        bias = biases[expert]
        return out if bias is None else out + bias.to(dtype)

    return product


def _linear(
    x_SK: Tensor, payload: Tensor, scale: Tensor, static_scale: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    rounded = round_activations(x_SK, FORMATS[format], static_scale, dtype)
    return matmul(rounded, dequantize(payload, scale, FORMATS[format], dtype).t(), dtype)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, payload, scale, static_scale, format, dtype):  # type: ignore[no-untyped-def]
        # the matrix is dequantised again for the backward pass: kept ones would be the whole stack
        ctx.save_for_backward(payload, scale)
        ctx.format, ctx.x_dtype = format, x_SK.dtype
        return _linear(x_SK, payload, scale, static_scale, format, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SN):  # type: ignore[no-untyped-def]
        payload, scale = ctx.saved_tensors
        w_NK = dequantize(payload, scale, FORMATS[ctx.format], grad_SN.dtype)
        return matmul(grad_SN, w_NK, ctx.x_dtype), None, None, None, None, None
