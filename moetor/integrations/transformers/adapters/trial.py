"""Whether a reading of a module is right: its own forward and moetor's, on a small copy with random weights.

The copy has the module's code and its flags, E experts, and hidden and intermediate sizes made
small in proportion, so that it costs next to nothing and needs no weights to be loaded.

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....core.errors import MoetorError
from ....core.interface import ExpertsInterface
from ....core.weights import ExpertWeights

if TYPE_CHECKING:
    from .adapter import Adapter

# Of each row of a result, relative to its norm. Both sides run in float32.
_TOLERANCE = 1e-4
# Tokens of several sizes: a clamp is reached by the largest, a bias told by the smallest.
_SCALES = (0.3, 1.0, 30.0, 1000.0)
# Of a block, which has a router: scores of larger ones are all 1 and 0, and choices among equals mean nothing.
_BLOCK_SCALES = (0.3, 1.0, 1.0, 10.0)
# Hidden or intermediate size of a copy.
_SMALLEST = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a small copy: E, H, and how many tokens to try (an even number)."""

    experts: int
    hidden: int
    tokens: int


def example_call(module: nn.Module, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K)."""
    scores = torch.rand(sizes.tokens, sizes.experts)
    weights, index = scores.topk(min(2, sizes.experts))
    return example_rows(sizes), index, weights


def example_block(module: nn.Module, sizes: Sizes) -> tuple[Tensor]:
    """hidden_states (2, T / 2, H)."""
    return (example_rows(sizes, _BLOCK_SCALES).view(2, -1, sizes.hidden),)


def example_rows(sizes: Sizes, scales: tuple[float, ...] = _SCALES) -> Tensor:
    """(T, H), small and large."""
    scale = torch.tensor(scales).repeat(-(-sizes.tokens // len(scales)))[: sizes.tokens]
    return torch.randn(sizes.tokens, sizes.hidden) * scale[:, None]


def run_eager(weights: ExpertWeights, *call: Tensor) -> Tensor:
    """Not through experts_forward: MOETOR_EXPERTS and check_routing() are for the user's calls."""
    return ExpertsInterface["eager"].forward(weights, *call)


@contextmanager
def quietly() -> Iterator[None]:
    """The same random numbers on CPU at each entry, without gradients, and none of it seen outside."""
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Trial:
    """One module's own forward, tried once, and readings compared with it; `str()` says how near they came."""

    def __init__(self, adapter: "Adapter", module: nn.Module) -> None:
        self._adapter = adapter
        self._module = module
        self._twin: nn.Module | None = None
        self._said = "it allows no reading"
        self._nearest = math.inf

    def __str__(self) -> str:
        return self._said if self._nearest == math.inf else f"its results are off by {self._nearest:.1e}"

    def agrees(self, facts: Any, *, training: bool = False) -> bool:
        """Whether moetor's forward by these facts gives what the module's own gives."""
        with quietly():
            try:
                expected = self._own(facts, training)
                found = self._ours(facts)
            except Exception as error:  # anything may go wrong in a stranger's code
                self._said = str(error) if isinstance(error, MoetorError) else f"{type(error).__name__}: {error}"
                return False
            off = difference(found, expected)
        self._nearest = min(self._nearest, off)
        return off <= _TOLERANCE

    def _own(self, facts: Any, training: bool) -> Any:
        if self._twin is None:
            weights = self._adapter.weights(self._module, facts)
            E, H, I = weights.num_experts, weights.hidden_size, weights.intermediate_size
            small = small_sizes(E, H, I)
            self._twin = twin(self._module, small)
            self._example = self._adapter.example(self._twin, Sizes(E, small.get(H, H), tokens=64 + 2 * E))
        self._twin.train(training)
        return self._twin(*_copied(self._example))

    def _ours(self, facts: Any) -> Any:
        twin, forward = self._twin, self._adapter.forward
        assert twin is not None
        assert forward is not None

        def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return run_eager(self._adapter.weights(twin, facts), hidden_states, top_k_index, top_k_weights)

        return forward(twin, facts, run, *_copied(self._example))


def _copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Some forwards write into what they are given."""
    return tuple(each.clone() if isinstance(each, Tensor) else each for each in arguments)


def small_sizes(E: int, H: int, I: int) -> dict[int, int]:
    """Old size to new, for H and I and what is made of them, as far as no number has two meanings.

    >>> small_sizes(8, 4096, 14336) == {4096: 4, 14336: 14, 28672: 28, 114688: 112, 229376: 224}
    True
    >>> small_sizes(512, 2048, 512)  # as many experts as rows of one: only H is made small
    {2048: 4}
    """
    unit = math.gcd(H, I)
    more = math.ceil(_SMALLEST * unit / min(H, I))
    h, i = H // unit * more, I // unit * more
    of_H, of_I = {H: h}, {n * I: n * i for n in (1, 2, E, 2 * E)}
    for small, agree in (
        (of_H | of_I, of_I.get(H, h) == h),
        ({H: _SMALLEST}, H not in of_I),
        (of_I, H not in of_I),
    ):
        if agree and min(small) > E and h < H:
            return small
    return {}


def twin(module: nn.Module, small: dict[int, int]) -> nn.Module:
    """The module's code and flags with random tensors of other sizes, on CPU in float32, without hooks.

    Args:
        small: old size to new, of dimensions of tensors and of whole numbers among the flags.
    """
    other = module.__new__(type(module))
    other.__dict__ = {name: _resized(value, small) for name, value in module.__dict__.items() if name not in _OURS}
    for name, value in module.__dict__.items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            other.__dict__[name] = type(value)()
    other._parameters = {name: _parameter(value, small) for name, value in module._parameters.items()}
    other._buffers = {name: _buffer(value, small) for name, value in module._buffers.items()}
    other._modules = {name: None if child is None else twin(child, small) for name, child in module._modules.items()}
    return other


# of accelerate's hooks and of an earlier attach
_OURS = ("forward", "_old_forward", "_hf_hook", "_parameters", "_buffers", "_modules")


def _resized(value: Any, small: dict[int, int]) -> Any:
    if type(value) is int:
        return small.get(value, value)
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):  # a config
        value = copy.copy(value)
        value.__dict__ = {name: _resized(each, small) for name, each in value.__dict__.items()}
    return value


def _parameter(value: Tensor | None, small: dict[int, int]) -> nn.Parameter | None:
    if value is None:
        return None
    shape = [small.get(size, size) for size in value.shape]
    fan_in = shape[-1] if shape else 1
    # a bias, and a vector that scales, are large enough to be missed
    return nn.Parameter(torch.randn(shape) * (fan_in**-0.5 if len(shape) > 1 else 1.0), requires_grad=False)


def _buffer(value: Tensor | None, small: dict[int, int]) -> Tensor | None:
    if value is None:
        return None
    if not value.is_floating_point():
        return torch.zeros_like(value, device="cpu") if value.is_meta else value.detach().cpu()
    return torch.randn([small.get(size, size) for size in value.shape])


def difference(found: Any, expected: Any) -> float:
    """The largest error of a row, relative to its norm; inf where the two are not alike."""
    if isinstance(expected, (tuple, list)):
        if not isinstance(found, (tuple, list)) or len(found) != len(expected):
            return math.inf
        return max((difference(f, e) for f, e in zip(found, expected, strict=True)), default=0.0)
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return 0.0 if found is expected or found == expected else math.inf
    if found.shape != expected.shape or not expected.isfinite().all():
        return math.inf
    found, expected = found.double().flatten(0, -2), expected.double().flatten(0, -2)
    off = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    return float(off.max())
