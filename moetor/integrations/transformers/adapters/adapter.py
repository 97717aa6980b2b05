"""What moetor must know of a module to run its experts, and the table of those it knows. Start here.

An adapter turns a module of somebody's model into `ExpertWeights`, and what the module is called
with into one call of `experts_forward`. It is data and functions:

    recognises   is this a module of the kind?
    read         its facts (flags, gate): every reading that its parts allow
    weights      its tensors, read at every call, as ExpertWeights
    forward      in place of its own forward, for modules without a seam in transformers
    example      arguments to try that forward with

A reading is believed only if it gives what the module's own forward gives, on a small copy with
random weights (`trial.py`). So an adapter that is wrong, or has become wrong with a new release, is
an error when a model is attached and never a wrong result.

Only facts are cached on the module; a view of a tensor made earlier would carry no gradient after
`no_grad`, and be stale after `.to()` or a reload.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....core.errors import InvalidInput
from ....core.weights import ExpertWeights
from ..first_look import look
from .trial import Sizes, Trial, example_call

FACTS_KEY = "_moetor_facts"
ADAPTER_KEY = "_moetor_adapter"

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def _no_holders(module: nn.Module, facts: Any) -> Iterable[nn.Module]:
    return ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """How modules of one kind are run.

    Attributes:
        name: of the kind.
        recognises: (module) -> whether the module is of this kind; asked of every module of a model.
        read: (module) -> readings of the module, simplest first: any objects that compare and pickle.
            Raises InvalidInput naming what is not understood.
        weights: (module, facts) -> its weights as they are now.
        forward: (module, facts, run, *what the module is called with) -> what its own forward returns.
            `run(hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K))` runs the experts.
            None: transformers calls moetor by itself.
        example: (module, sizes) -> positional arguments of that forward, float32 tensors on CPU.
        holders: (module, facts) -> other modules whose weights are read without calling them.

    An example: a stranger's experts, called with scores of all experts in place of the chosen ones.

    >>> import torch, moetor
    >>> from torch import nn
    >>> class MyExperts(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.wi, self.wo = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 6))
    ...     def forward(self, x, scores):
    ...         each = torch.einsum("eti,ehi->eth", torch.einsum("th,eih->eti", x, self.wi).relu(), self.wo)
    ...         kept = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, scores.topk(2).values)
    ...         return torch.einsum("eth,te->th", each, kept)

    >>> from moetor import Activation, ExpertWeights, Weight
    >>> def weights(module, facts):
    ...     return ExpertWeights(Weight(module.wi), Weight(module.wo), Activation("relu"), gated=False)
    >>> def forward(module, facts, run, x, scores):
    ...     chosen = scores.topk(2)
    ...     return run(x, chosen.indices, chosen.values)
    >>> def example(module, sizes):
    ...     return torch.randn(9, sizes.hidden), torch.rand(9, sizes.experts)

    >>> mine = Adapter("mine", lambda m: isinstance(m, MyExperts), lambda m: [None], weights, forward, example)
    >>> register_adapter(mine)
    >>> is_experts(MyExperts()), experts_of(MyExperts()).num_experts
    (True, 4)

    One that is wrong is refused (here the second largest score is forgotten):

    >>> def wrong(module, facts, run, x, scores):
    ...     chosen = scores.topk(1)
    ...     return run(x, chosen.indices, chosen.values)
    >>> from dataclasses import replace
    >>> register_adapter(replace(mine, forward=wrong), replace=True)
    >>> experts_of(MyExperts())
    Traceback (most recent call last):
    moetor.core.errors.InvalidInput: MyExperts is not what the adapter 'mine' knows: its results are off by ...
    >>> unregister_adapter("mine")
    """

    name: str
    recognises: Callable[[nn.Module], bool]
    read: Callable[[nn.Module], Iterable[Any]]
    weights: Callable[[nn.Module, Any], ExpertWeights]
    forward: Callable[..., Any] | None = None
    example: Callable[[nn.Module, Sizes], tuple[Any, ...]] = example_call
    holders: Callable[[nn.Module, Any], Iterable[nn.Module]] = _no_holders


_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(adapter: Adapter, *, replace: bool = False) -> None:
    """Teach moetor a kind of module; see `Adapter` for an example. It is asked before those registered earlier.

    Raises:
        InvalidInput: its name is taken.
    """
    if adapter.name in _ADAPTERS and not replace:
        raise InvalidInput(f"adapter {adapter.name!r} is registered already; pass replace=True to replace it")
    _ADAPTERS[adapter.name] = adapter


def unregister_adapter(name: str) -> None:
    """Forget an adapter."""
    del _ADAPTERS[name]


def is_experts(module: nn.Module) -> bool:
    """Whether this module is one that moetor runs, or would have to refuse (`facts_of` tells which)."""
    return ADAPTER_KEY in module.__dict__ or _find(module) is not None


def adapter_of(module: nn.Module) -> Adapter:
    """The adapter of a module.

    Raises:
        InvalidInput: there is none.
    """
    name = module.__dict__.get(ADAPTER_KEY)
    if name is not None and name not in _ADAPTERS:
        raise InvalidInput(f"{type(module).__name__} was attached with the adapter {name!r}; register it here, too")
    adapter = _find(module) if name is None else _ADAPTERS[name]
    if adapter is None:
        raise InvalidInput(f"{type(module).__name__} is no experts module that moetor knows")
    return adapter


def facts_of(module: nn.Module) -> Any:
    """The module's facts, read once.

    Raises:
        InvalidInput: it is no experts module, has parts that moetor does not know, or computes
            something else than these tell.
    """
    if torch.compiler.is_compiling():
        look(module, FACTS_KEY, _read)
    if FACTS_KEY not in module.__dict__:
        module.__dict__[FACTS_KEY] = _read(module)
    return module.__dict__[FACTS_KEY]


def experts_of(module: nn.Module) -> ExpertWeights:
    """The module's weights as they are now.

    Raises:
        InvalidInput: see `facts_of`.
    """
    facts = facts_of(module)
    return adapter_of(module).weights(module, facts)


def _find(module: nn.Module) -> Adapter | None:
    for adapter in reversed(_ADAPTERS.values()):
        if adapter.recognises(module):
            return adapter
    return None


def _read(module: nn.Module) -> Any:
    """The first reading that does what the module does; its adapter's name is noted on the module."""
    adapter = adapter_of(module)
    facts = _believed(adapter, module)
    module.__dict__[ADAPTER_KEY] = adapter.name
    return facts


def _believed(adapter: Adapter, module: nn.Module) -> Any:
    readings = adapter.read(module)
    if adapter.forward is None:
        return next(iter(readings))
    trial = Trial(adapter, module)
    for facts in readings:
        if trial.agrees(facts):
            return facts
    raise InvalidInput(f"{type(module).__name__} is not what the adapter {adapter.name!r} knows: {trial}")
