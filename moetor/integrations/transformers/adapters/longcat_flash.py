"""LongCat-Flash: ids from E onward are experts that do nothing, and add weight · x.

gate_up_proj has rows for them, (E + Z, 2I, H), which nothing reads; down_proj (E, H, I) has not.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....core.activation import Activation
from ....core.errors import InvalidInput
from ....core.weights import ExpertWeights, Weight
from ..gates import gated_by, read_function
from .adapter import Adapter, Run
from .names import is_a
from .tensors import plain
from .trial import Sizes, example_call

recognises = is_a("LongcatFlashExperts")


def read(module: Any) -> Iterator[Activation | None]:
    """f(gate) · up as data, or None: by the module's own function."""
    if module.gate_up_proj is None:
        raise InvalidInput(f"{type(module).__name__} has no experts but those that do nothing")
    yield read_function(module.act_fn)


def weights(module: Any, facts: Activation | None) -> ExpertWeights:
    down = plain(module, "down_proj")
    up = plain(module, "gate_up_proj")[: down.shape[0]]
    return ExpertWeights(Weight(up), Weight(down), facts or gated_by(module.act_fn))


def forward(
    module: nn.Module, facts: Any, run: Run, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    E, all_experts = plain(module, "down_proj").shape[0], plain(module, "gate_up_proj").shape[0]
    does_nothing = (top_k_index >= E) & (top_k_index < all_experts)
    routed = run(hidden_states, top_k_index.masked_fill(does_nothing, E), top_k_weights)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    share_T = torch.where(does_nothing, top_k_weights, 0).sum(-1, dtype=wide)
    return (routed.to(wide) + share_T[:, None] * hidden_states.to(wide)).to(hidden_states.dtype)


def example(module: Any, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    # all ids that the router may give
    return example_call(module, replace(sizes, experts=module.gate_up_proj.shape[0]))


ADAPTER = Adapter("longcat_flash", recognises, read, weights, forward, example)
