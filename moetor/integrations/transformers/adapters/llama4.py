"""Llama 4: the score of an expert scales its input and not its output, so the block is what is adapted.

A token's row differs from expert to expert: each pair is run as a token of its own, with one expert
and weight 1. Stored (in, out). The block's own forward runs all tokens through all experts.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....core.activation import Activation
from ....core.weights import ExpertWeights, Weight
from ..gates import gated_by, read_function
from .adapter import Adapter, Run
from .names import is_a
from .tensors import plain
from .trial import example_block

recognises = is_a("Llama4TextMoe")


def read(block: Any) -> Iterator[Activation | None]:
    yield read_function(block.experts.act_fn)


def weights(block: Any, facts: Activation | None) -> ExpertWeights:
    up, down = (Weight(plain(block.experts, name), transposed=True) for name in ("gate_up_proj", "down_proj"))
    return ExpertWeights(up, down, facts or gated_by(block.experts.act_fn))


def forward(block: Any, facts: Any, run: Run, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x_TH = hidden_states.reshape(-1, block.hidden_dim)
    scores_TE, router_logits = block.router(x_TH)
    # experts that were not chosen have score 0, and experts without a bias give 0 for it
    scores_TK, index_TK = scores_TE.topk(block.top_k, dim=-1)
    rows_SH = (x_TH[:, None] * scores_TK[..., None]).flatten(0, 1)
    out_SH = run(rows_SH, index_TK.reshape(-1, 1), torch.ones_like(scores_TK).reshape(-1, 1))
    out_TKH = out_SH.view(*scores_TK.shape, -1)
    routed = out_TKH[:, 0] if block.top_k == 1 else out_TKH.sum(1)
    return block.shared_expert(x_TH) + routed, router_logits


def holders(block: Any, facts: Any) -> Iterable[nn.Module]:
    return (block.experts,)


ADAPTER = Adapter("llama4", recognises, read, weights, forward, example_block, holders)
