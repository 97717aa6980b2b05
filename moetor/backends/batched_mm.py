"""The chosen experts' matrices gathered for each pair, and `torch.bmm`: few tokens on a GPU."""

import os

import torch
from torch import Tensor

from ..core.interface import Backend, Call
from ..core.routing import keep_pair_order
from ..core.weights import ExpertWeights, Weight
from ..kernels.gathered_matmul import gathered_matmul
from ..quantization import gathered_product
from .stacked import stacked_forward
from .stacked import why_not as stacked_why_not

# The most that gathered matrices may take at a time.
GATHER_BYTES = int(os.environ.get("MOETOR_GATHER_BYTES", 2**30))


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if reason := stacked_why_not(weights, call):
        return reason
    if call.compiling and not weights.quantized and (size := gathered_bytes(weights, call)) > GATHER_BYTES:
        return (
            f"would gather {size / 2**20:.0f} MiB at once while compiling, more than {GATHER_BYTES / 2**20:.0f} MiB;"
            " MOETOR_GATHER_BYTES raises the bound"
        )
    return None


def gathered_bytes(weights: ExpertWeights, call: Call) -> int:
    """Bytes that the larger of the two products gathers, without chunks."""
    return call.num_pairs * max(w.out_features * w.in_features * w.first.element_size() for w in weights.all)


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    order = keep_pair_order(top_k_index, weights.num_experts)
    expert_S, no_expert_S = order.expert_S, order.no_expert_S()

    def product(x_SK: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        if weights.quantized:
            return gathered_product(x_SK, weight, expert_S, dtype, GATHER_BYTES)
        return gathered_matmul(x_SK, weight.stack_ENK(), expert_S, no_expert_S, dtype, GATHER_BYTES)

    return stacked_forward(product, weights, hidden_states, top_k_weights, order)


BACKEND = Backend(
    "batched_mm", forward, why_not=why_not, summary="gathered matrices and one bmm, for few tokens on a GPU"
)
