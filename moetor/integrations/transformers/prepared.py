"""Quantised experts of a model, laid out once for the backends that were chosen for them.

What is laid out is a copy beside the module's own tensors, which every other backend goes on reading. It is dropped
when they change: by `load_state_dict`, by `.to()` and its like, and where their addresses or versions tell of it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...core.interface import ExpertsInterface
from ...core.weights import ExpertWeights, Prepared
from .adapters import experts_of

_KEY = "_moetor_prepared"


@dataclass(frozen=True, slots=True)
class _Kept:
    prepared: Prepared
    stamp: tuple[Any, ...]


def prepare(module: nn.Module, name: str) -> bool:
    """Lay one module's experts out for a backend; whether there was anything to lay out.

    Raises:
        InvalidInput, BackendUnavailable, BackendRefused: see `ExpertsInterface.prepare`.
    """
    weights = experts_of(module)
    if ExpertsInterface[name].prepare is None or not weights.quantized:
        return False
    prepared = ExpertsInterface.prepare(weights, name).prepared
    if prepared is None:
        return False
    module.__dict__[_KEY] = _Kept(prepared, _stamp(weights))
    return True


def with_prepared(module: nn.Module, weights: ExpertWeights) -> ExpertWeights:
    """The weights with what was laid out of them, if they have not changed since."""
    kept: _Kept | None = module.__dict__.get(_KEY)
    if kept is None:
        return weights
    # tensors that are traced have no addresses; what changes a compiled model's tensors goes through `drop`
    if not torch.compiler.is_compiling() and kept.stamp != _stamp(weights):
        drop(module)
        return weights
    return replace(weights, prepared=kept.prepared)


def drop(model: nn.Module) -> None:
    """Forget what was laid out in a model or a part of it."""
    for module in model.modules():
        module.__dict__.pop(_KEY, None)


def _stamp(weights: ExpertWeights) -> tuple[Any, ...]:
    return tuple(
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for weight in weights.all
        for tensor in weight.frozen_tensors()
    )
