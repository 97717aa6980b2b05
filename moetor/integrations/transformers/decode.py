"""The decode phase: on a GPU, experts set to grouped_mm run batched_mm while `generate` adds token after token.

A step of decoding has few tokens: gathering their experts' matrices then beats sorting them. A prompt has many. So the
phase decides, together with the bytes that a step gathers (`backends.auto.few_pairs`).

The phase belongs to the thread in which `generate` runs, and neither to a model nor to a config, which threads share.
`generate` of transformers is wrapped, once for all models, because it alone knows where it begins and ends;
every loop in it (greedy and sampling, beams, assisted) calls `_update_model_kwargs_for_generation` after a step, and
the first such call ends the prefill, which may have been several forward passes. What is asked at every call of the
experts is one set of strings, which torch.compile guards for each thread.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from ... import forward
from ...backends.auto import few_pairs
from ...core.weights import ExpertWeights
from .adapters import experts_of
from .choice import backend_of, config_keys, experts_by_key
from .offload import execution_device
from .top_k import top_k_of

PREFILL, DECODE = "grouped_mm", "batched_mm"

_OFF = os.environ.get("MOETOR_DECODE_SWITCH", "1") == "0"
_GROUP = "_moetor_group"
_NUMBERS = itertools.count()
_tagging = threading.Lock()


class Group:
    """Experts modules that decode together: those under one key of one model's config.

    It is a name and no more, the same for all layers, so that torch.compile can use one layer's graph for the next.
    Copies of a model decode apart: copying and unpickling make a new group, one for all modules that shared the old.
    """

    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name = f"group {next(_NUMBERS)}"

    def __reduce__(self) -> tuple[type["Group"], tuple[()]]:
        return Group, ()


class _Thread(threading.local):
    """Where this thread is; values are replaced, never changed, so that what was saved is what is restored.

    Attributes:
        model: whose `generate` runs, the innermost if several do.
        top_k: K of each group in that model; None before its prefill has ended.
        decoding: names of the groups in their decode phase.
        pairs: for each of those, S in a step of it.
        kept: inside `without_decode_switch`.
    """

    # Attributes of the class would be constants to torch.compile (torch 2.11); __init__ runs once in every thread.
    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.top_k: Mapping[str, int] | None = None
        self.decoding: frozenset[str] = frozenset()
        self.pairs: Mapping[str, int] = {}
        self.kept = False


_thread = _Thread()


@contextmanager
def without_decode_switch() -> Iterator[None]:
    """Inside, `generate` keeps to the backends that were chosen, also while it decodes; this thread only.

    `MOETOR_DECODE_SWITCH=0` in the environment does it for a whole process.

    >>> with without_decode_switch():
    ...     pass  # model.generate(...)
    """
    before = _thread.kept
    _thread.kept = True
    try:
        yield
    finally:
        _thread.kept = before


def switches_on(device: torch.device) -> bool:
    """Whether the decode phase changes anything on this device: on a CPU grouped_mm is the faster one throughout."""
    return device.type == "cuda"


def running(module: nn.Module, name: str, weights: ExpertWeights, num_pairs: int, device: torch.device) -> str:
    """The backend that runs a call of this module, given its own: another one only in the decode phase.

    Args:
        num_pairs: S, tokens times experts of each.
        device: that the call runs on.
    """
    if name != PREFILL or not _decoding(module):
        return name
    return DECODE if switches_on(device) and num_pairs <= few_pairs(weights) else name


def shown(module: nn.Module) -> str:
    """The backend of this module for who asks now, from inside a streamer or stopping criterion perhaps."""
    name = backend_of(module)
    if forward.OVERRIDE or name != PREFILL or not _decoding(module):
        return name
    weights = experts_of(module)
    num_pairs = _thread.pairs[module.__dict__[_GROUP].name]
    return running(module, name, weights, num_pairs, execution_device(module, weights.device))


def explanation(name: str, weights: ExpertWeights, top_k: int, device: torch.device) -> str | None:
    """What the decode phase changes for experts of this backend, in words; None: nothing."""
    if name != PREFILL or forward.OVERRIDE or not switches_on(device):
        return None
    if _OFF or _thread.kept:
        return f"{PREFILL}, the switch to {DECODE} is off"
    return f"{DECODE} up to {few_pairs(weights) // top_k} tokens a step, {PREFILL} beyond"


def _decoding(module: nn.Module) -> bool:
    # Empty outside of generate, where the module is then not asked for a group that it may get later: torch.compile
    # would compile again.
    if not _thread.decoding:
        return False
    group: Group | None = module.__dict__.get(_GROUP)
    return group is not None and group.name in _thread.decoding


def _groups(model: Any) -> dict[str, int]:
    """Name and K of every group in the model; experts without one get it here."""
    configs = config_keys(model.config)
    found = {}
    with _tagging:
        for key, modules in experts_by_key(model).items():
            group = next((m.__dict__[_GROUP] for m in modules if _GROUP in m.__dict__), None) or Group()
            for module in modules:
                module.__dict__.setdefault(_GROUP, group)
            found[group.name] = top_k_of(configs[key])
    return found


@contextmanager
def _scope(model: nn.Module, continues: bool) -> Iterator[None]:
    """One `generate` of this model, whatever the calls around it are at; all is restored after it.

    Args:
        continues: no prefill comes first.
    """
    before = _thread.model, _thread.top_k, _thread.decoding, _thread.pairs
    _thread.model, _thread.top_k = model, None
    if _thread.decoding:
        _thread.decoding = _thread.decoding.difference(_groups(model))
    if continues:
        _decode(model, num_tokens=1)
    try:
        yield
    finally:
        _thread.model, _thread.top_k, _thread.decoding, _thread.pairs = before


def _decode(model: nn.Module, num_tokens: int) -> None:
    """From here on the model decodes, with so many tokens in a step."""
    if _OFF or _thread.kept:
        return
    if _thread.top_k is None:
        _thread.top_k = _groups(model)
    _thread.pairs = {**_thread.pairs, **{name: num_tokens * k for name, k in _thread.top_k.items()}}
    _thread.decoding = _thread.decoding.union(_thread.top_k)


def _after_step(model: nn.Module, outputs: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Note that a step of the running `generate` is done: the next is one of decoding.

    Without a cache there is none: every step runs the whole text again.
    """
    if _thread.model is not model or model_kwargs.get("use_cache") is False:
        return
    # logits of (sequences, positions, vocabulary); how many positions a prompt has tells nothing of the steps to come
    logits = getattr(outputs, "logits", None)
    num_tokens = 1 if logits is None else len(logits)
    if logits is not None and logits.dim() == 3 and _thread.top_k is not None:
        num_tokens *= logits.shape[1]
    _decode(model, num_tokens)


def _continues(generation_config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether this is an assistant's next draft: a call of `generate` that goes on from the cache of the one before."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return cache is not None and bool(getattr(generation_config, "is_assistant", False))


def follow(mixin: type[GenerationMixin]) -> None:
    """Make `generate` of every model tell its phase; see the head of this page."""
    generate: Callable[..., Any] = mixin.generate
    update: Callable[..., Any] = mixin._update_model_kwargs_for_generation

    @wraps(generate)
    def generate_in_phases(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _scope(self, _continues(kwargs.get("generation_config"), kwargs)):
            return generate(self, *args, **kwargs)

    @wraps(update)
    def update_after_step(self: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        _after_step(self, outputs, model_kwargs)
        return update(self, outputs, model_kwargs, *args, **kwargs)

    mixin.generate = generate_in_phases  # type: ignore[method-assign]
    mixin._update_model_kwargs_for_generation = update_after_step  # type: ignore[method-assign]


follow(GenerationMixin)
