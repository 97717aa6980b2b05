"""Each row times the matrix of its own expert, gathered: one `torch.bmm` a chunk, with gradients.

Letters: S rows, E experts, N output and K input size. Good where there are few rows: a matrix is
copied once for every row that uses it. Rows of no expert read some expert's matrix; what they
hold on return is not defined. Nothing here reads a value on the host.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..matmul import matmul
from .gradient import weight_gradient

__all__ = ["gathered_matmul"]


def gathered_matmul(
    x_SK: Tensor, w_ENK: Tensor, expert_S: Tensor, no_expert_S: Tensor, dtype: torch.dtype, chunk_bytes: int
) -> Tensor:
    """Row s: x_SK[s] · w_ENK[expert_S[s]]ᵀ, (S, N) in `dtype`.

    Args:
        expert_S: (S,) integer, all of them in [0, E).
        no_expert_S: (S,) bool, rows that the gradient of w leaves out, whatever they hold.
        chunk_bytes: the most that gathered matrices may take at a time; while tracing, one chunk.

    >>> x, w = torch.tensor([[1.0], [2.0]]), torch.tensor([[[10.0]], [[20.0]]])
    >>> gathered_matmul(x, w, torch.tensor([1, 0]), torch.tensor([False, False]), torch.float32, 2**20).tolist()
    [[20.0], [20.0]]
    """
    if not (torch.is_grad_enabled() and (x_SK.requires_grad or w_ENK.requires_grad)):
        return _product(x_SK, w_ENK, expert_S, dtype, chunk_bytes)
    out: Tensor = _GatheredMatmul.apply(x_SK, w_ENK, expert_S, no_expert_S, dtype, chunk_bytes)
    return out


def _product(x_SK: Tensor, w_ENK: Tensor, expert_S: Tensor, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    S, (_, N, K) = x_SK.shape[0], w_ENK.shape
    # Gathering in the order of storage reads whole rows of memory; the view is turned afterwards.
    turned = w_ENK.stride(-1) != 1 and w_ENK.stride(-2) == 1
    stored = w_ENK.transpose(1, 2) if turned else w_ENK
    step = max(1, chunk_bytes // (N * K * w_ENK.element_size()))
    if torch.compiler.is_compiling() or step >= S:
        return _chunk(x_SK, stored, turned, expert_S, dtype)
    chunks = zip(x_SK.split(step), expert_S.split(step), strict=True)
    return torch.cat([_chunk(x, stored, turned, expert, dtype) for x, expert in chunks])


def _chunk(x_SK: Tensor, stored: Tensor, turned: bool, expert_S: Tensor, dtype: torch.dtype) -> Tensor:
    # on a GPU indexing copies whole matrices at once, index_select element by element
    gathered = stored[expert_S] if stored.is_cuda else stored.index_select(0, expert_S)
    return matmul(x_SK.unsqueeze(1), gathered if turned else gathered.transpose(1, 2), dtype).squeeze(1)


class _GatheredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_ENK, expert_S, no_expert_S, dtype, chunk_bytes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_SK if ctx.needs_input_grad[1] else None, w_ENK, expert_S, no_expert_S)
        ctx.x_dtype, ctx.chunk_bytes = x_SK.dtype, chunk_bytes
        return _product(x_SK, w_ENK, expert_S, dtype, chunk_bytes)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SN):  # type: ignore[no-untyped-def]
        x_SK, w_ENK, expert_S, no_expert_S = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad_SN, w_ENK.transpose(1, 2), expert_S, ctx.x_dtype, ctx.chunk_bytes)
        if ctx.needs_input_grad[1]:
            grad_w = weight_gradient(grad_SN, x_SK, expert_S.masked_fill(no_expert_S, w_ENK.shape[0]), w_ENK)
        return grad_x, grad_w, None, None, None, None
