"""Switch Transformers: one expert a token, told by a mask (T, 1, E); none beyond an expert's capacity.

The experts are a ModuleDict of MLPs without a gate, with a dropout between f and the second product.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....core.activation import Activation
from ....core.weights import ExpertWeights
from .adapter import Adapter, Run
from .mlp import Mlp, linears_of, outside_of_graphs, read_mlp, weights_of
from .names import is_a
from .trial import Sizes, example_rows


def read(experts: nn.Module) -> Iterator[Mlp]:
    yield read_mlp(list(experts._modules.values()))


def weights(experts: nn.Module, facts: Mlp) -> ExpertWeights:
    mlps: list[Any] = list(experts.children())
    found = weights_of(mlps, facts)
    dropout = mlps[0].dropout
    if not (experts.training and dropout.p):
        return found
    return replace(found, activation=Activation.custom(lambda rows: dropout(facts.activation.apply(rows, None))))


@outside_of_graphs
def forward(
    experts: nn.Module, facts: Mlp, run: Run, hidden_states: Tensor, selected: Tensor, routing_weights: Tensor
) -> Tensor:
    mask_TKE = selected.bool()
    E = mask_TKE.shape[-1]
    index_TK = torch.where(mask_TKE.any(-1), mask_TKE.int().argmax(-1), E)
    return run(hidden_states, index_TK, routing_weights.reshape(index_TK.shape))


def example(experts: nn.Module, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.randint(sizes.experts + 1, (sizes.tokens, 1))
    mask = nn.functional.one_hot(index, sizes.experts + 1)[..., : sizes.experts]
    return example_rows(sizes), mask, torch.rand(sizes.tokens, 1)


def holders(experts: Any, facts: Mlp) -> Iterable[nn.Module]:
    return linears_of(list(experts.children()), facts)


ADAPTER = Adapter("switch", is_a("SwitchTransformersExperts"), read, weights, forward, example, holders)
