"""What grouped_mm and batched_mm share: everything around two products over all rows at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.routing import ExpertOrder, clear_rows_of_no_expert, combine, expert_bias, gather_tokens
from ..core.weights import ExpertWeights, Weight, apply_gate
from ..kernels.matmul import result_dtype

NEEDS_A_STACK = "needs the experts' weights in one tensor, got a list; moetor.stack_experts(model) puts them into one"

# (x (S, K), weight, dtype of the result) -> (S, N)
Product = Callable[[Tensor, Weight, torch.dtype], Tensor]


def why_not(weights: ExpertWeights) -> str | None:
    """The reason that holds for both."""
    if weights.quantized:
        return f"needs dense weights, got {weights.format}"
    if not weights.stacked:
        return NEEDS_A_STACK
    return None


def stacked_forward(
    product: Product, weights: ExpertWeights, hidden_states: Tensor, top_k_weights: Tensor, order: ExpertOrder
) -> Tensor:
    """Gather, first product, gate, second product, combine; (T, H)."""
    x_SH = gather_tokens(hidden_states, order)
    dtype, rows_dtype = x_SH.dtype, result_dtype(x_SH.dtype)
    # A model's own functions may have parameters, which must not see rows that nobody wrote.
    foreign_gate = weights.activation.fn is not None

    products = tuple(_add_bias(product(x_SH, up, dtype), up, order, dtype) for up in weights.ups)
    if foreign_gate:
        products = tuple(clear_rows_of_no_expert(rows, order) for rows in products)
    inner = apply_gate(weights, products).to(dtype)
    if foreign_gate:
        inner = clear_rows_of_no_expert(inner, order)
    # The bias of the second product is added in fp32, so that a contribution is rounded once.
    with_bias = torch.promote_types(rows_dtype, torch.float32)
    rows_SH = _add_bias(product(inner, weights.down, rows_dtype), weights.down, order, with_bias)
    if weights.after_down is not None:
        rows_SH = weights.after_down(clear_rows_of_no_expert(rows_SH, order).to(rows_dtype))
    return combine(rows_SH, top_k_weights, order, dtype)


def _add_bias(rows_SN: Tensor, weight: Weight, order: ExpertOrder, dtype: torch.dtype) -> Tensor:
    bias_EN = weight.bias_EN()
    return rows_SN if bias_EN is None else rows_SN.to(dtype) + expert_bias(bias_EN, order).to(dtype)
