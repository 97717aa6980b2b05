"""The gradient of the weights of a gathered product: one buffer, no atomics, no host sync on GPUs.

Adding each row's outer product into the buffer would round the running sum once a row, and on a
GPU add in no fixed order. So the rows are sorted and it is a grouped product; where that would
need the host to read offsets, it is a masked product over a few experts at a time.
"""

import torch
from torch import Tensor

from ...core.routing import ends_of_experts
from .. import grouped_matmul as grouped
from ..matmul import matmul

_CHUNK_BYTES = 2**28


def weight_gradient(grad_SN: Tensor, x_SK: Tensor, expert_S: Tensor, w_ENK: Tensor) -> Tensor:
    """Expert e: Σ over the rows with expert_S = e of grad_SN[s]ᵀ x_SK[s], like w_ENK (E, N, K)."""
    E = w_ENK.shape[0]
    if not grad_SN.is_cuda or grouped.native_gradient(grad_SN, x_SK, w_ENK.dtype):
        sorted_S, row_S = torch.sort(expert_S, stable=True)
        ends_E = ends_of_experts(sorted_S, E)
        return grouped.weight_gradient(grad_SN.index_select(0, row_S), x_SK.index_select(0, row_S), ends_E, w_ENK)
    return masked_weight_gradient(grad_SN, x_SK, expert_S, w_ENK)


def masked_weight_gradient(grad_SN: Tensor, x_SK: Tensor, expert_S: Tensor, w_ENK: Tensor) -> Tensor:
    """The same from products in which other experts' rows are replaced by zeros.

    E times the arithmetic of the grouped product, but at the few rows that gathering is good for
    writing the buffer costs more than that. Rows are selected on both sides: they may hold NaN.
    """
    E, N, K = w_ENK.shape
    both = torch.promote_types(grad_SN.dtype, x_SK.dtype)
    grad_SN, x_SK = grad_SN.to(both), x_SK.to(both)
    experts = torch.arange(E, device=expert_S.device, dtype=expert_S.dtype)
    step = max(1, _CHUNK_BYTES // max(1, grad_SN.shape[0] * (N + K) * both.itemsize))
    parts = []
    for start in [0] if torch.compiler.is_compiling() else range(0, E, step):
        of_expert = experts[start : E if torch.compiler.is_compiling() else start + step]
        mine = (of_expert[:, None] == expert_S[None, :])[..., None]
        grad = torch.where(mine, grad_SN[None], 0)
        x = torch.where(mine, x_SK[None], 0)
        parts.append(matmul(grad.transpose(1, 2), x, w_ENK.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
