"""What a draw's result, and its gradients, must be: the oracle's, one expert at a time.

Letters: T tokens, H hidden size.
"""

import torch
from torch import Tensor

from ..testing import Case, Inputs, oracle
from .cases import Draw

# Rows of one expert at a time: 1 GB of float64 at 2·I = 32768.
REFERENCE_ROWS = 4096


def reference(draw: Draw, gradients: bool = False) -> list[Tensor]:
    """The result (T, H) in float64 on the draw's device, one expert at a time, so that no stack is widened.

    Args:
        gradients: add those of `draw.leaves()`, in their order; they do take a stack in float64.
    """
    leaves = draw.leaves() if gradients else []
    out = torch.zeros(draw.hidden_states.shape, dtype=torch.float64, device=draw.hidden_states.device)
    sums = [torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device) for leaf in leaves]
    case = Case(dtype=draw.cell.dtype)
    upstream = draw.hidden_states if draw.upstream is None else draw.upstream
    for expert in draw.top_k_index.unique().tolist():
        one = draw.weights.map(lambda tensor: tensor[expert : expert + 1])  # noqa: B023  called at once
        tokens, slots = (draw.top_k_index == expert).nonzero(as_tuple=True)
        for token, slot in zip(tokens.split(REFERENCE_ROWS), slots.split(REFERENCE_ROWS), strict=True):
            # where there is no gradient to check, autograd is not to be at work either
            kept = _as_it_is if gradients else Tensor.detach
            x, routing = kept(draw.hidden_states[token]), kept(draw.top_k_weights[token, slot, None])
            ids = torch.zeros_like(routing, dtype=torch.int64)
            inputs = Inputs(case, one.map(kept), x, ids, routing)
            rows, grads = oracle(inputs, upstream[token])
            out.index_add_(0, token, rows)
            if gradients:
                sums[0].index_add_(0, token, grads.pop("hidden_states"))
                sums[1].index_put_((token, slot), grads.pop("top_k_weights")[:, 0], accumulate=True)
                for total, gradient in zip(sums[2:], grads.values(), strict=True):
                    total[expert] += gradient[0]
    return [out, *sums]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
