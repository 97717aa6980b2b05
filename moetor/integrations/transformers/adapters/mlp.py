"""Experts that are modules of their own: down(f(gate(x)) · up(x)), or down(f(up(x))), of two or three Linears.

Which Linear is which, and what f is, is found by trying: the module's own forward tells.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ....core.activation import KINDS, Activation
from ....core.errors import InvalidInput
from ....core.weights import ExpertWeights, Weight
from .tensors import plain
from .trial import Sizes, difference, example_rows, quietly, run_eager, small_sizes, twin

_TOLERANCE = 1e-6
_ACTIVATIONS = (*(Activation(kind) for kind in KINDS), Activation("silu", alpha=1.702))

# Whether experts lie in one stack is told by their addresses, which a graph does not know.
_F = TypeVar("_F", bound=Callable[..., Any])
outside_of_graphs: Callable[[_F], _F] = torch.compiler.disable(
    reason="moetor runs experts that are modules of their own outside of torch.compile"
)


# weight and bias of a Linear
Tensors = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Mlp:
    """One expert, and all the others like it.

    Attributes:
        ups: names of the Linears of the first product: (gate, up), or (up,).
        down: name of the second.
    """

    ups: tuple[str, ...]
    down: str
    activation: Activation


def read_mlp(experts: list[nn.Module | None]) -> Mlp:
    """What the experts compute.

    Raises:
        InvalidInput: they differ, are no such modules, are quantised, or compute something else.
    """
    here = [expert for expert in experts if expert is not None]
    if len(here) < len(experts):
        raise InvalidInput("some of its experts are not here, but on other ranks")
    first, who = here[0], type(here[0]).__name__
    parts = [
        [name for name, child in expert.named_children() if any(True for _ in child.parameters())] for expert in here
    ]
    names = parts[0]
    if len(names) not in (2, 3) or any(True for _ in first.parameters(recurse=False)):
        raise InvalidInput(f"its experts ({who}) are not made of two or three Linears, but of {names or 'no'} parts")
    if any(type(expert) is not type(first) for expert in here) or any(own != names for own in parts):
        raise InvalidInput(f"its experts differ: not each is a {who}")
    shapes = {tuple(_shape(weight_of(expert, name)) for name in names) for expert in here}
    if len(shapes) > 1:
        raise InvalidInput(f"its experts ({who}) differ in their sizes or biases")
    mlp = _tried(first, names)
    if mlp is None:
        raise InvalidInput(f"its experts ({who}) compute no down(f(gate) · up) of an f that moetor knows")
    return mlp


def weights_of(experts: list[nn.Module], mlp: Mlp) -> ExpertWeights:
    """The experts as they are now: of one stack if they lie in one (`moetor.stack_experts`), else lists."""
    ups = [[weight_of(expert, name) for expert in experts] for name in mlp.ups]
    down = _weight([weight_of(expert, mlp.down) for expert in experts])
    up: Weight | tuple[Weight, Weight]
    if len(ups) == 1:
        up = _weight(ups[0])
    else:
        gate_first = [tensors for pair in zip(*ups, strict=True) for tensors in pair]
        up = _side_by_side(gate_first) or (_weight(ups[0]), _weight(ups[1]))
    return ExpertWeights(up, down, mlp.activation, gated=len(ups) == 2)


def linears_of(experts: list[nn.Module], mlp: Mlp) -> Iterator[nn.Module]:
    """The modules that hold the weights."""
    for expert in experts:
        for name in (*mlp.ups, mlp.down):
            yield expert._modules[name]  # type: ignore[misc]


def weight_of(expert: nn.Module, name: str) -> Tensors:
    """Weight and bias of one Linear.

    Asked anew at each call: what a library puts in its place (LoRA, 4-bit) may look like one, and
    what it does in hooks (pruning) is done only if the Linear is called.
    """
    linear: Any = expert._modules[name]
    if type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks:
        # without asking by attribute: 64 experts have 192 Linears a layer, which takes 190 µs like this
        weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
        if type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter):
            return weight, bias
    if type(linear) is not nn.Linear and parametrize.type_before_parametrizations(linear) is not nn.Linear:
        raise InvalidInput(
            f"{type(expert).__name__}.{name} is no torch.nn.Linear but {type(linear).__module__}."
            f"{type(linear).__name__}, of which moetor would read a part only"
        )
    if linear._forward_hooks or linear._forward_pre_hooks:
        raise InvalidInput(f"{type(expert).__name__}.{name} has hooks, which moetor would not call; remove them first")
    return plain(linear, "weight"), None if linear.bias is None else plain(linear, "bias")


def _weight(tensors: list[Tensors]) -> Weight:
    weights, biases = zip(*tensors, strict=True)
    return Weight.of(list(weights), None if biases[0] is None else list(biases))


def _side_by_side(gate_first: list[Tensors]) -> Weight | None:
    """Gate and up as one Weight of 2I rows, if they lie so: gate, up, gate, up."""
    both = _weight(gate_first)
    if not isinstance(both.data, Tensor) or not both.data.is_contiguous() or isinstance(both.bias, list):
        return None
    num_experts = len(gate_first) // 2
    bias = None if both.bias is None else both.bias.reshape(num_experts, -1)
    return Weight(both.data.view(num_experts, -1, both.in_features), bias)


def _shape(tensors: Tensors) -> tuple[torch.Size, bool]:
    weight, bias = tensors
    return weight.shape, bias is not None


def _tried(expert: nn.Module, names: list[str]) -> Mlp | None:
    """The order of the Linears and the f that give what the expert gives, tried on a small copy."""
    for *ups, down in itertools.permutations(names):
        H, I = weight_of(expert, down)[0].shape
        if any(weight_of(expert, up)[0].shape != (I, H) for up in ups):
            continue
        with quietly():
            small = small_sizes(1, H, I)
            small_expert = twin(expert, small).double().eval()
            x = example_rows(Sizes(1, small.get(H, H), tokens=64)).double()
            try:
                expected = small_expert(x)
            except (RuntimeError, TypeError, ValueError):
                return None
            for activation in _ACTIVATIONS:
                mlp = Mlp(tuple(ups), down, activation)
                index, ones = torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1)
                found = run_eager(weights_of([small_expert], mlp), x, index, ones)
                if difference(found, expected) <= _TOLERANCE:
                    return mlp
    return None
