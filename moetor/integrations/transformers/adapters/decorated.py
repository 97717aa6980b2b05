"""Experts that transformers runs through its experts interface: one layout, told by flags.

gate_up_proj (E, 2I, H) or, without a gate, up_proj (E, I, H); down_proj (E, H, I); the last two
sizes exchanged if transposed; biases under the same names with `_bias`. The flags are attributes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ....core.activation import Activation
from ....core.errors import InvalidInput
from ....core.weights import ExpertWeights, Weight
from ..gates import read_gate
from ..quantized_experts import stored_in, weight_of
from .adapter import Adapter
from .tensors import plain, require_unpacked

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


def is_decorated(module: nn.Module) -> bool:
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


def weights(module: nn.Module, facts: Facts) -> ExpertWeights:
    return ExpertWeights(
        up=_weight(module, facts.up_name, facts),
        down=_weight(module, "down_proj", facts),  # type: ignore[arg-type]  # a pair is of gate and up only
        activation=facts.activation or Activation.custom(module._apply_gate if facts.gated else module.act_fn),  # type: ignore[arg-type]
        gated=facts.gated,
        interleaved=facts.interleaved,
        after_down=getattr(module, _NORM) if facts.has_norm else None,
    )


def _weight(module: nn.Module, name: str, facts: Facts) -> Weight | tuple[Weight, Weight]:
    bias: Tensor | None = plain(module, f"{name}_bias") if facts.has_bias else None
    if (stored := stored_in(module)) is not None:
        return weight_of(module, stored, name, bias)
    return Weight(plain(module, name), bias, transposed=facts.transposed)


def read(module: nn.Module) -> Iterator[Facts]:
    flags: Any = module
    gated, has_bias = flags.has_gate, flags.has_bias
    has_norm = getattr(flags, "has_post_expert_norm", False)
    up_name = "gate_up_proj" if gated else "up_proj"
    stored = stored_in(module)
    known = {up_name, "down_proj"} if stored is None else stored.all_names()
    known |= {f"{up_name}_bias", "down_proj_bias"} if has_bias else set()
    parts = {"act_fn"} | ({_NORM} if has_norm else set())
    _require_known_parts(module, known, parts)
    if stored is None:
        require_unpacked(module, *sorted(known))
    interleaved = gated and not flags.is_concatenated
    yield Facts(
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


ADAPTER = Adapter("decorated", is_decorated, read, weights)
