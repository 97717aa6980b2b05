"""DBRX: gate w1, up v1 and down w2 of all experts, flat (E·I, H) each, in a module of their own.

The second product reads w2 as (E, I, H), so stored (in, out). Called with hidden_states (B, S, H).
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ....core.activation import Activation
from ....core.weights import ExpertWeights, Weight
from ..gates import gated_by, read_function
from .adapter import Adapter, Run
from .names import is_a
from .tensors import plain
from .trial import Sizes, example_call

recognises = is_a("DbrxExperts")


def read(module: Any) -> Iterator[Activation | None]:
    yield read_function(module.mlp.activation_fn)


def weights(module: Any, facts: Activation | None) -> ExpertWeights:
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (plain(module.mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    activation = facts or gated_by(module.mlp.activation_fn)
    return ExpertWeights((Weight(gate), Weight(up)), Weight(down, transposed=True), activation)


def forward(
    module: nn.Module, facts: Any, run: Run, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return run(rows, top_k_index, top_k_weights).view(hidden_states.shape[0], -1, rows.shape[-1])


def example(experts: nn.Module, sizes: Sizes) -> tuple[Any, ...]:
    hidden_states, index, weights = example_call(experts, sizes)
    return hidden_states.view(2, -1, sizes.hidden), index, weights


def holders(module: Any, facts: Any) -> Iterable[nn.Module]:
    return (module.mlp,)


ADAPTER = Adapter("dbrx", recognises, read, weights, forward, example, holders)
