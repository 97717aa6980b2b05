"""A loop over the experts that were hit, in plain torch: runs everywhere, defines the others."""

import torch
from torch import Tensor

from ..core.interface import Backend, Call
from ..core.routing import combine, gather_tokens, group_by_expert
from ..core.weights import ExpertWeights, apply_gate
from ..kernels.matmul import linear, result_dtype


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if weights.quantized:
        return f"needs dense weights, got {weights.format}"
    if call.capturing:
        return "reads the number of tokens of each expert on the host, which a CUDA graph cannot capture"
    return None


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    order = group_by_expert(top_k_index, weights.num_experts)
    assert order.ends_E is not None
    x_SH = gather_tokens(hidden_states, order)
    dtype, rows_dtype = x_SH.dtype, result_dtype(x_SH.dtype)

    ends = order.ends_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    rows_of = x_SH.split([*sizes, x_SH.shape[0] - ends[-1]])
    # With no rows at all one expert still runs, so that every tensor stays in the graph; where
    # each expert has tensors of its own, all of them do.
    every = not weights.stacked and torch.is_grad_enabled()
    hit = [expert for expert, size in enumerate(sizes) if size or every] or [0]

    ups = [(up.matrices(), up.biases()) for up in weights.ups]
    downs, down_biases = weights.down.matrices(), weights.down.biases()
    results = []
    for expert in hit:
        products = tuple(linear(rows_of[expert], w[expert], b[expert], dtype) for w, b in ups)
        inner = apply_gate(weights, products).to(dtype)
        rows = linear(inner, downs[expert], down_biases[expert], rows_dtype)
        results.append(rows if weights.after_down is None else weights.after_down(rows))
    rest = rows_of[-1].shape[0]
    if rest:
        results.append(results[0].new_zeros(rest, weights.hidden_size))
    rows_SH = results[0] if len(results) == 1 else torch.cat(results)
    return combine(rows_SH, top_k_weights, order, dtype)


BACKEND = Backend("eager", forward, why_not=why_not, summary="loop over the experts that were hit, plain torch")
