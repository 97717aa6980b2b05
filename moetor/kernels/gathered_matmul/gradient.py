"""The gradient of the weights of a gathered product: one buffer, no atomics, no host sync on GPUs.

Adding each row's outer product into the buffer would round the running sum once a row, and on a
GPU add in no fixed order. So the rows are sorted and it is a grouped product; where that would
need the host to read offsets, it is a masked product over a few experts at a time.
"""

import torch
from torch import Tensor

from ...core.routing import ends_of_experts
from ..grouped_matmul import native
from ..library import define, run
from ..matmul import matmul

_CHUNK_BYTES = 2**28


def weight_gradient(grad_SN: Tensor, x_SK: Tensor, expert_S: Tensor, w_ENK: Tensor) -> Tensor:
    """Expert e: Σ over the rows with expert_S = e of grad_SN[s]ᵀ x_SK[s], like w_ENK (E, N, K)."""
    if w_ENK.stride(-1) != 1 and w_ENK.stride(-2) == 1:
        return weight_gradient(x_SK, grad_SN, expert_S, w_ENK.transpose(1, 2)).transpose(1, 2)
    op = torch.ops.moetor.gathered_matmul_weight_gradient.default
    out: Tensor = run(op, grad_SN, x_SK, expert_S, w_ENK.shape[0], w_ENK.dtype)
    return out


def _weight_gradient(grad: Tensor, x: Tensor, expert: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    if grad.is_cuda and not native.can_run_gradient(grad, x, dtype):
        return masked_weight_gradient(grad, x, expert, num_experts, dtype)
    sorted_S, row_S = torch.sort(expert, stable=True)
    ends = ends_of_experts(sorted_S, torch.arange(num_experts, device=expert.device, dtype=expert.dtype))
    op = torch.ops.moetor.grouped_matmul_weight_gradient.default
    out: Tensor = run(op, grad.index_select(0, row_S), x.index_select(0, row_S), ends, dtype)
    return out


def masked_weight_gradient(
    grad_SN: Tensor, x_SK: Tensor, expert_S: Tensor, num_experts: int, dtype: torch.dtype
) -> Tensor:
    """The same from products in which other experts' rows are replaced by zeros.

    E times the arithmetic of the grouped product, but at the few rows that gathering is good for
    writing the buffer costs more than that. Rows are selected on both sides: they may hold NaN.
    """
    E, N, K = num_experts, grad_SN.shape[1], x_SK.shape[1]
    both = torch.promote_types(grad_SN.dtype, x_SK.dtype)
    grad_SN, x_SK = grad_SN.to(both), x_SK.to(both)
    experts = torch.arange(E, device=expert_S.device, dtype=expert_S.dtype)
    step = max(1, _CHUNK_BYTES // max(1, grad_SN.shape[0] * (N + K) * both.itemsize))
    parts = []
    for start in range(0, E, step):
        of_expert = experts[start : start + step]
        mine = (of_expert[:, None] == expert_S[None, :])[..., None]
        grad = torch.where(mine, grad_SN[None], 0)
        x = torch.where(mine, x_SK[None], 0)
        parts.append(matmul(grad.transpose(1, 2), x, dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


define(
    "gathered_matmul_weight_gradient(Tensor grad, Tensor x, Tensor expert, int num_experts, ScalarType dtype)"
    " -> Tensor",
    _weight_gradient,
    lambda grad, x, expert, num_experts, dtype: grad.new_empty(num_experts, grad.shape[1], x.shape[1], dtype=dtype),
)
