"""JetMoE, and Aria before it was decorated: each of the two products is a module that holds one stack.

JetMoE: input_linear.weight (E, 2I, H) and output_linear.weight (E, H, I), in a block with its router
and a bias. Aria: fc1.weight (E, H, 2I) and fc2.weight (E, I, H), called with the router's logits.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core.activation import SILU, Activation
from ....core.weights import ExpertWeights, Weight
from ..gates import gated_by, read_function
from .adapter import Adapter, Run
from .names import is_a
from .tensors import plain
from .trial import Sizes, example_block, example_rows


def jetmoe_read(block: Any) -> Iterator[Activation | None]:
    yield read_function(block.activation)


def jetmoe_weights(block: Any, facts: Activation | None) -> ExpertWeights:
    up, down = Weight(plain(block.input_linear, "weight")), Weight(plain(block.output_linear, "weight"))
    return ExpertWeights(up, down, facts or gated_by(block.activation))


def jetmoe_forward(block: Any, facts: Any, run: Run, layer_input: Tensor) -> Tensor:
    x_TH = layer_input.reshape(-1, layer_input.shape[-1])
    # the router is called, as transformers records what it returns, though its sorting is not needed
    logits_TE = block.router(x_TH)[-1]
    logits_TK, index_TK = logits_TE.topk(block.router.top_k, dim=1)
    weights_TK = F.softmax(logits_TK, dim=1).type_as(layer_input)
    bias: Tensor = block.bias
    return run(x_TH, index_TK, weights_TK).view(layer_input.shape) + bias


def jetmoe_holders(block: Any, facts: Any) -> Iterable[nn.Module]:
    return block.input_linear, block.output_linear


JETMOE = Adapter(
    "jetmoe", is_a("JetMoeMoE"), jetmoe_read, jetmoe_weights, jetmoe_forward, example_block, jetmoe_holders
)


def aria_read(module: Any) -> Iterator[Activation]:
    yield SILU


def aria_weights(module: Any, facts: Activation) -> ExpertWeights:
    up, down = (Weight(plain(stack, "weight"), transposed=True) for stack in (module.fc1, module.fc2))
    return ExpertWeights(up, down, facts)


def aria_forward(module: Any, facts: Any, run: Run, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
    index_TK, weights_TK = module.route_tokens_to_experts(router_logits)
    return run(hidden_states, index_TK, weights_TK)


def aria_example(module: nn.Module, sizes: Sizes) -> tuple[Tensor, Tensor]:
    return example_rows(sizes), torch.randn(sizes.tokens, sizes.experts)


def aria_holders(module: Any, facts: Any) -> Iterable[nn.Module]:
    return module.fc1, module.fc2


# newer releases decorate this class, and `decorated` is asked first
ARIA = Adapter("aria", is_a("AriaExperts"), aria_read, aria_weights, aria_forward, aria_example, aria_holders)
