"""Each row times the matrix of its own expert, gathered: one `torch.bmm` a chunk, with gradients.

Letters: S rows, E experts, N output and K input size. Good where there are few rows: a matrix is
copied once for every row that uses it. Rows of no expert read the last expert's matrix; what
they hold on return is not defined. Nothing here reads a value on the host.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..matmul import matmul
from .gradient import weight_gradient

__all__ = ["gathered_matmul"]


def gathered_matmul(x_SK: Tensor, w_ENK: Tensor, expert_S: Tensor, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    """Row s: x_SK[s] · w_ENK[expert_S[s]]ᵀ, (S, N) in `dtype`.

    Args:
        expert_S: (S,) integer; E for rows of no expert.
        chunk_bytes: the most that gathered matrices may take at a time; while tracing, one chunk.

    >>> x, w = torch.tensor([[1.0], [2.0]]), torch.tensor([[[10.0]], [[20.0]]])
    >>> gathered_matmul(x, w, torch.tensor([1, 0]), torch.float32, 2**20).tolist()
    [[20.0], [20.0]]
    """
    if not (torch.is_grad_enabled() and (x_SK.requires_grad or w_ENK.requires_grad)):
        return _product(x_SK, w_ENK, expert_S, dtype, chunk_bytes)
    out: Tensor = _GatheredMatmul.apply(x_SK, w_ENK, expert_S, dtype, chunk_bytes)
    return out


def _product(x_SK: Tensor, w_ENK: Tensor, expert_S: Tensor, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    S, (E, N, K) = x_SK.shape[0], w_ENK.shape
    # Gathering in the order of storage reads whole rows of memory; the view is turned afterwards.
    turned = w_ENK.stride(-1) != 1 and w_ENK.stride(-2) == 1
    stored = w_ENK.transpose(1, 2) if turned else w_ENK
    safe_S = expert_S.clamp(max=E - 1)
    step = S if torch.compiler.is_compiling() else max(1, chunk_bytes // (N * K * w_ENK.element_size()))
    parts = []
    for start in [0] if torch.compiler.is_compiling() else range(0, max(S, 1), step):
        rows = x_SK[start : start + step]
        chosen = safe_S[start : start + step]
        # on a GPU indexing copies whole matrices at once, index_select element by element
        gathered = stored[chosen] if stored.is_cuda else stored.index_select(0, chosen)
        gathered = gathered if turned else gathered.transpose(1, 2)
        parts.append(matmul(rows.unsqueeze(1), gathered, dtype).squeeze(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _GatheredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_ENK, expert_S, dtype, chunk_bytes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_SK if ctx.needs_input_grad[1] else None, w_ENK, expert_S)
        ctx.x_dtype, ctx.chunk_bytes = x_SK.dtype, chunk_bytes
        return _product(x_SK, w_ENK, expert_S, dtype, chunk_bytes)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SN):  # type: ignore[no-untyped-def]
        x_SK, w_ENK, expert_S = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad_SN, w_ENK.transpose(1, 2), expert_S, ctx.x_dtype, ctx.chunk_bytes)
        if ctx.needs_input_grad[1]:
            grad_w = weight_gradient(grad_SN, x_SK, expert_S, w_ENK)
        return grad_x, grad_w, None, None, None
