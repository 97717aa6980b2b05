"""One transformers experts module as ExpertWeights: where the differences between models end.

Facts about a module (flags, gate) are cached on it; its tensors are read at every call. A view
made earlier would carry no gradient after `no_grad`, and be stale after `.to()` or a reload.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...core.activation import Activation
from ...core.errors import InvalidInput
from ...core.weights import ExpertWeights, Weight
from .first_look import look
from .gates import read_gate

_FACTS = "_moetor_facts"
_NORM = "post_expert_norm"


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while a module lives.

    Attributes:
        up_name: of the parameter that holds the first product.
        activation: the gate as data; None: the module's own method, bound at each call.
    """

    up_name: str
    gated: bool
    interleaved: bool
    transposed: bool
    has_bias: bool
    has_norm: bool
    activation: Activation | None


def is_experts(module: nn.Module) -> bool:
    """Whether this is an experts module that transformers runs through its experts interface.

    The instance is asked, not the source text of its class, so that a class from a notebook
    counts, and one that is run by another interface (FP8Experts) does not.
    """
    forward = type(module).forward
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if "experts_interface" not in names:
        return False
    cell = forward.__closure__[names.index("experts_interface")]  # type: ignore[index]
    return cell.cell_contents is ALL_EXPERTS_FUNCTIONS


def facts_of(module: nn.Module) -> Facts:
    """The module's facts, read once.

    Raises:
        InvalidInput: it is no experts module, or has parts that moetor does not know.
    """
    if torch.compiler.is_compiling():
        look(module, _FACTS, _read_facts)
    facts: Facts | None = module.__dict__.get(_FACTS)
    if facts is None:
        facts = _read_facts(module)
        module.__dict__[_FACTS] = facts
    return facts


def experts_of(module: nn.Module) -> ExpertWeights:
    """The module's weights as they are now.

    Raises:
        InvalidInput: see `facts_of`.
    """
    facts = facts_of(module)
    return ExpertWeights(
        up=_weight(module, facts.up_name, facts),
        down=_weight(module, "down_proj", facts),
        activation=facts.activation or Activation.custom(module._apply_gate if facts.gated else module.act_fn),  # type: ignore[arg-type]
        gated=facts.gated,
        interleaved=facts.interleaved,
        after_down=getattr(module, _NORM) if facts.has_norm else None,
    )


def _weight(module: nn.Module, name: str, facts: Facts) -> Weight:
    bias: Tensor | None = getattr(module, f"{name}_bias") if facts.has_bias else None
    return Weight(getattr(module, name), bias, transposed=facts.transposed)


def _read_facts(module: nn.Module) -> Facts:
    who = type(module).__name__
    if not is_experts(module):
        raise InvalidInput(f"{who} is no experts module that transformers runs through its experts interface")
    flags: Any = module
    gated, has_bias = flags.has_gate, flags.has_bias
    has_norm = getattr(flags, "has_post_expert_norm", False)
    up_name = "gate_up_proj" if gated else "up_proj"
    known = {up_name, "down_proj"} | ({f"{up_name}_bias", "down_proj_bias"} if has_bias else set())
    parts = {"act_fn"} | ({_NORM} if has_norm else set())
    _require_known_parts(module, known, parts)
    for name in (up_name, "down_proj"):
        if not getattr(module, name).is_floating_point() or getattr(module, name).element_size() < 2:
            raise InvalidInput(f"{who}.{name} holds packed or quantised numbers ({getattr(module, name).dtype})")
    interleaved = gated and not flags.is_concatenated
    return Facts(
        up_name=up_name,
        gated=gated,
        interleaved=interleaved,
        transposed=flags.is_transposed,
        has_bias=has_bias,
        has_norm=has_norm,
        activation=read_gate(module, gated=gated, interleaved=interleaved),
    )


def _require_known_parts(module: nn.Module, parameters: set[str], children: set[str]) -> None:
    """A parameter or a child of unknown use would be left out of the result: refuse it."""
    have = {name for name, _ in module.named_parameters(recurse=False)}
    parametrized = module._modules.get("parametrizations")
    have |= set(parametrized) if isinstance(parametrized, nn.ModuleDict) else set()
    unknown = sorted(have - parameters)
    unknown += sorted({name for name, _ in module.named_children()} - children - {"parametrizations"})
    missing = sorted(parameters - have)
    if unknown or missing:
        raise InvalidInput(
            f"{type(module).__name__} does not have the parts that its flags tell:"
            f" unknown {unknown or 'none'}, missing {missing or 'none'}"
        )
