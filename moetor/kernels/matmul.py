"""One product with the dtypes that experts meet: mixed ones under autocast, fp32 results for fp16.

A large expert output with a small routing weight must not become inf, so for fp16 the second
product gives fp32. Where dtypes differ, the weights follow the activations, one matrix at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.autocast import without_autocast


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an expert's output rows for activations of `dtype`."""
    return torch.float32 if dtype == torch.float16 else dtype


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N), or batches of both, computed in a's dtype or wider, given in `dtype`.

    >>> matmul(torch.full((1, 1), 300.0).half(), torch.full((1, 1), 300.0).half(), torch.float32)
    tensor([[90000.]])
    """
    with without_autocast(a.device.type):
        return matmul_as_it_is(a, b, dtype, out)


def matmul_as_it_is(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The same inside `without_autocast`: for a loop that asks once."""
    batched = a.dim() == 3
    product = torch.bmm if batched else _mm
    if b.dtype != a.dtype:
        b = b.to(a.dtype)
    if a.dtype == dtype:
        return product(a, b) if out is None else product(a, b, out=out)
    widen = torch.promote_types(a.dtype, dtype) == dtype
    if not widen:
        result = product(a, b).to(dtype)
    elif a.is_cuda and dtype == torch.float32:
        result = (torch.bmm if batched else torch.mm)(a, b, out_dtype=torch.float32)
    else:
        result = product(a.to(dtype), b.to(dtype))
    return result if out is None else out.copy_(result)


def _mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    if not _better_as_two(a):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    result = torch.mm(a.expand(2, -1), b)[:1]
    return result if out is None else out.copy_(result)


def _better_as_two(a: Tensor) -> bool:
    """Whether a is one row of bfloat16 on a CPU: oneDNN takes 6 to 12 % less time over the same row twice.

    Measured at (N, K) from (2048, 1408) to (7168, 4096), 2 cores of an EPYC with avx512_bf16, torch 2.13.
    """
    return a.shape[0] == 1 and a.dtype == torch.bfloat16 and a.is_cpu


def linear(x_SK: Tensor, w_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x · wᵀ + bias in `dtype`, with gradients; a converted w is not kept for the backward pass."""
    if x_SK.dtype == w_NK.dtype == dtype and (bias_N is None or bias_N.dtype == dtype):
        return F.linear(x_SK.expand(2, -1), w_NK, bias_N)[:1] if _better_as_two(x_SK) else F.linear(x_SK, w_NK, bias_N)
    out: Tensor = _MixedLinear.apply(x_SK, w_NK, dtype)
    return out if bias_N is None else (out + bias_N.to(dtype))


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_NK, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_SK, w_NK)
        return matmul(x_SK, w_NK.t(), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SN):  # type: ignore[no-untyped-def]
        x_SK, w_NK = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = matmul(grad_SN, w_NK, x_SK.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = matmul(grad_SN.t(), x_SK, w_NK.dtype)
        return grad_x, grad_w, None
