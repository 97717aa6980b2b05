"""What grouped_mm and batched_mm share: everything around two products over all rows at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.interface import Call
from ..core.routing import ExpertOrder, clear_rows_of_no_expert, combine, expert_bias, gather_tokens
from ..core.weights import ExpertWeights, Weight, apply_gate
from ..kernels.matmul import result_dtype
from ..quantization import compute_dtype, frozen_why_not

NEEDS_A_STACK = "needs the experts' weights in one tensor, got a list; moetor.stack_experts(model) puts them into one"

# (x (S, K), weight, dtype of the result) -> (S, N)
Product = Callable[[Tensor, Weight, torch.dtype], Tensor]


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    """The reason that holds for both."""
    return NEEDS_A_STACK if not weights.stacked else frozen_why_not(weights, call)


def stacked_forward(
    product: Product, weights: ExpertWeights, hidden_states: Tensor, top_k_weights: Tensor, order: ExpertOrder
) -> Tensor:
    """Gather, first product, gate, second product, combine; (T, H)."""
    dtype = compute_dtype(hidden_states.dtype) if weights.quantized else hidden_states.dtype
    rows_dtype = result_dtype(dtype)
    # each step's input is let go of when its result is there: fresh memory costs time on a CPU
    inner_SI = _first_half(product, weights, gather_tokens(hidden_states, order), order, dtype)
    rows_SH = product(inner_SI, weights.down, rows_dtype)
    del inner_SI
    if (bias_EH := weights.down.bias_EN()) is not None:
        # in fp32, so that a contribution is rounded once
        rows_SH = _add_bias(rows_SH, bias_EH, order, torch.promote_types(rows_dtype, torch.float32))
    if weights.after_down is not None:
        rows_SH = weights.after_down(clear_rows_of_no_expert(rows_SH, order).to(rows_dtype))
    return combine(rows_SH, top_k_weights, order, hidden_states.dtype)


def _first_half(
    product: Product, weights: ExpertWeights, x_SH: Tensor, order: ExpertOrder, dtype: torch.dtype
) -> Tensor:
    """First product and gate, (S, I)."""
    products = []
    for up in weights.ups:
        rows, bias_EN = product(x_SH, up, dtype), up.bias_EN()
        products.append(rows if bias_EN is None else _add_bias(rows, bias_EN, order, dtype))
    if weights.activation.fn is None:
        return apply_gate(weights, tuple(products)).to(dtype)
    # A model's own function may have parameters, which must not see rows that nobody wrote.
    products = [clear_rows_of_no_expert(rows, order) for rows in products]
    return clear_rows_of_no_expert(apply_gate(weights, tuple(products)).to(dtype), order)


def _add_bias(rows_SN: Tensor, bias_EN: Tensor, order: ExpertOrder, dtype: torch.dtype) -> Tensor:
    return rows_SN.to(dtype) + expert_bias(bias_EN, order).to(dtype)
