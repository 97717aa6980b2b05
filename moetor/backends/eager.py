"""A loop over the experts that were hit, in plain torch: runs everywhere, defines the others."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.formats import FORMATS
from ..core.interface import Backend, Call
from ..core.routing import combine, gather_tokens, group_by_expert
from ..core.weights import ExpertWeights, Weight, apply_gate
from ..kernels.matmul import linear, result_dtype
from ..quantization import compute_dtype, frozen_why_not, quantized_product


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if reason := frozen_why_not(weights, call):
        return reason
    if call.device.type == "meta":
        return "reads the number of tokens of each expert, which tensors without values do not tell"
    if call.capturing:
        return "reads the number of tokens of each expert on the host, which a CUDA graph cannot capture"
    return None


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    order = group_by_expert(top_k_index, weights.num_experts)
    assert order.ends_E is not None
    x_SH = gather_tokens(hidden_states, order)
    dtype = compute_dtype(x_SH.dtype) if weights.quantized else x_SH.dtype

    ends = order.ends_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # With no rows at all one expert still runs, so that every tensor stays in the graph; where
    # each expert has tensors of its own, all of them do.
    every = not weights.stacked and torch.is_grad_enabled()
    hit = [expert for expert, size in enumerate(sizes) if size or every] or [0]
    rest = x_SH.shape[0] - ends[-1]
    rows_of_hit = x_SH.split([*(sizes[expert] for expert in hit), rest])

    up_products, down_product = [_product(up) for up in weights.ups], _product(weights.down)
    results = []
    for expert, x_RH in zip(hit, rows_of_hit, strict=False):
        products = tuple([up_product(expert, x_RH, dtype) for up_product in up_products])
        inner = apply_gate(weights, products).to(dtype)
        rows = down_product(expert, inner, result_dtype(dtype))
        results.append(rows if weights.after_down is None else weights.after_down(rows))
    if rest:
        results.append(results[0].new_zeros(rest, weights.hidden_size))
    rows_SH = results[0] if len(results) == 1 else torch.cat(results)
    return combine(rows_SH, top_k_weights, order, hidden_states.dtype)


def _product(weight: Weight) -> Callable[[int, Tensor, torch.dtype], Tensor]:
    """(expert, x (S, K), dtype) -> (S, N)."""
    if FORMATS[weight.format].quantized:
        return quantized_product(weight)
    # without gradients the stack is its matrices' list, and only those that are hit are looked at
    in_stack = weight.stacked and not torch.is_grad_enabled()
    matrices, biases = weight.stack_ENK() if in_stack else weight.matrices(), weight.biases()
    return lambda expert, x_SK, dtype: linear(x_SK, matrices[expert], biases[expert], dtype)


BACKEND = Backend("eager", forward, why_not=why_not, summary="loop over the experts that were hit, plain torch")
