"""Pairs sorted by expert and one grouped product each way, PyTorch's own where it runs."""

import torch
from torch import Tensor

from ..core.interface import Backend, Call
from ..core.routing import group_by_expert
from ..core.weights import ExpertWeights, Weight
from ..kernels.grouped_matmul import grouped_matmul
from ..kernels.grouped_matmul.native import device_has_it, takes_layout
from ..quantization import grouped_product
from .stacked import stacked_forward
from .stacked import why_not as stacked_why_not


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if reason := stacked_why_not(weights, call):
        return reason
    if call.device.type not in ("cpu", "cuda", "meta"):
        return f"needs CPU or CUDA tensors, got {call.device.type}"
    if call.capturing and not _native(weights, call):
        return "loops on the host for these weights, which a CUDA graph cannot capture; aligned bfloat16 ones it can"
    return None


def _native(weights: ExpertWeights, call: Call) -> bool:
    if weights.quantized:
        return False
    on_device = weights.device.type != "cuda" or device_has_it(weights.device)  # meta stands for any device
    layouts = all(takes_layout(weight.stack_ENK()) for weight in weights.all)
    return on_device and layouts and call.dtype == torch.bfloat16


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    order = group_by_expert(top_k_index, weights.num_experts)
    ends_E = order.ends_E
    assert ends_E is not None

    def product(x_SK: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        if weights.quantized:
            return grouped_product(x_SK, weight, ends_E, dtype)
        return grouped_matmul(x_SK, weight.stack_ENK(), ends_E, dtype)

    return stacked_forward(product, weights, hidden_states, top_k_weights, order)


BACKEND = Backend(
    "grouped_mm", forward, why_not=why_not, summary="pairs sorted by expert, one grouped product each way"
)
