"""Experts in the layout of transformers' interface whose class is not decorated: step3p7, and strangers' own.

Called as (hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K)) -> (T, H). They have no
flags to tell their layout: every layout that the shapes allow is tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....core.activation import Activation
from ....core.errors import InvalidInput
from ....core.weights import ExpertWeights, Weight
from ..gates import gated_by, read_function, read_gate
from .adapter import Adapter, Run
from .decorated import is_decorated
from .tensors import plain, require_unpacked

_NAMES = {"gate_up_proj", "down_proj"}


@dataclass(frozen=True, slots=True)
class Facts:
    """See `decorated.Facts`; activation None: the module's own method or function, bound at each call."""

    interleaved: bool
    transposed: bool
    activation: Activation | None


def recognises(module: nn.Module) -> bool:
    return set(_names(module)) == _NAMES and hasattr(module, "act_fn") and not is_decorated(module)


def read(module: nn.Module) -> Iterator[Facts]:
    if unknown := sorted({name for name, _ in module.named_children()} - {"act_fn", "parametrizations"}):
        raise InvalidInput(f"{type(module).__name__} has parts that moetor does not know: {', '.join(unknown)}")
    require_unpacked(module, *sorted(_NAMES))
    for transposed in (False, True):
        for interleaved in (False, True):
            if hasattr(module, "_apply_gate"):
                activation = read_gate(module, gated=True, interleaved=interleaved)
            else:
                activation = read_function(module.act_fn)  # type: ignore[arg-type]
            if activation is not None:
                yield Facts(interleaved, transposed, activation)
    for transposed in (False, True):
        yield Facts(False, transposed, None)


def weights(module: nn.Module, facts: Facts) -> ExpertWeights:
    return ExpertWeights(
        Weight(plain(module, "gate_up_proj"), transposed=facts.transposed),
        Weight(plain(module, "down_proj"), transposed=facts.transposed),
        facts.activation or _own_gate(module),
        interleaved=facts.interleaved,
    )


def _own_gate(module: Any) -> Activation:
    return Activation.custom(module._apply_gate) if hasattr(module, "_apply_gate") else gated_by(module.act_fn)


def forward(
    module: nn.Module, facts: Facts, run: Run, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    return run(hidden_states, top_k_index, top_k_weights)


def _names(module: nn.Module) -> Iterator[str]:
    """Of the module's own parameters, parametrized or not."""
    yield from module._parameters
    parametrized = module._modules.get("parametrizations")
    if isinstance(parametrized, nn.ModuleDict):
        yield from parametrized


ADAPTER = Adapter("undecorated", recognises, read, weights, forward)
