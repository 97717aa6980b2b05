"""One layer of experts, end to end: check, choose, run. The page to read first."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from . import backends as _backends  # noqa: F401  registers ours
from . import debug
from .core.activation import Activation
from .core.autocast import autocast_enabled, without_autocast
from .core.errors import InvalidInput
from .core.interface import Backend, Call, ExpertsInterface, describe_call
from .core.weights import ExpertWeights

# Overrides every choice, for hunting a bug: MOETOR_EXPERTS=eager.
OVERRIDE = os.environ.get("MOETOR_EXPERTS") or None


def experts_forward(
    weights: ExpertWeights,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    backend: str = "auto",
) -> Tensor:
    """Run the chosen experts of each token and add their results, weighted.

    Letters: T tokens, K experts per token, E experts, H hidden size.

    Args:
        weights: the layer's experts.
        hidden_states: (T, H), in the dtype of the weights; inside autocast any float dtype.
        top_k_index: (T, K) int32 or int64. -1 and E mean "no expert here" and add nothing, as any
            other id outside [0, E) does; `moetor.debug.check_routing()` makes the latter an error.
        top_k_weights: (T, K), any float dtype; applied in fp32.
        backend: a name from `ExpertsInterface.names()`.

    Returns:
        (T, H) in the dtype of hidden_states: Σ_k top_k_weights[t, k] · expert(hidden_states[t]).

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit together.
        UnknownBackend, BackendUnavailable, BackendRefused: see `ExpertsInterface.select`.

    >>> import torch
    >>> from moetor import ExpertWeights, Weight, Activation
    >>> weights = ExpertWeights(
    ...     up=Weight(torch.tensor([[[1.0]], [[10.0]]])), down=Weight(torch.tensor([[[1.0]], [[1.0]]])),
    ...     activation=Activation("identity"), gated=False)
    >>> experts_forward(weights, torch.tensor([[2.0]]), torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.25]]))
    tensor([[6.]])
    """
    _check(weights, hidden_states, top_k_index, top_k_weights)
    if debug.checking():
        top_k_index = debug.checked_ids(top_k_index, weights.num_experts)
    call = describe_call(weights, hidden_states, top_k_index, top_k_weights)
    chosen = ExpertsInterface.select(weights, call, OVERRIDE or backend)
    return _run(chosen, call, weights, hidden_states, top_k_index, top_k_weights)


def _run(
    backend: Backend,
    call: Call,
    weights: ExpertWeights,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    if not call.autocast:
        return backend.forward(weights, hidden_states, top_k_index, top_k_weights)
    # Autocast is honoured here, once: below, a dtype that was chosen is not changed again. A model's
    # own functions still run inside it.
    weights = _foreign_inside_autocast(weights, call)
    with without_autocast(call.device.type):
        out = backend.forward(weights, hidden_states.to(call.dtype), top_k_index, top_k_weights)
        return out.to(hidden_states.dtype)


def _foreign_inside_autocast(weights: ExpertWeights, call: Call) -> ExpertWeights:
    def inside(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(rows: Tensor) -> Tensor:
            with torch.autocast(call.device.type, dtype=call.dtype):
                return fn(rows)

        return run

    if weights.activation.fn is not None:
        weights = replace(weights, activation=Activation.custom(inside(weights.activation.fn)))
    if weights.after_down is not None:
        weights = replace(weights, after_down=inside(weights.after_down))
    return weights


def _check(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    x_shape, ids_shape = hidden_states.shape, top_k_index.shape
    if len(x_shape) != 2:
        raise InvalidInput(f"hidden_states must have shape (T, H), got {tuple(x_shape)}")
    if len(ids_shape) != 2:
        raise InvalidInput(f"top_k_index must have shape (T, K), got {tuple(ids_shape)}")
    if top_k_index.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(f"top_k_index must be int64 or int32, got {top_k_index.dtype}")
    if top_k_weights.shape != ids_shape or ids_shape[0] != x_shape[0]:
        raise InvalidInput(
            f"top_k_index and top_k_weights must both have shape (T, K) with T = {x_shape[0]} as in"
            f" hidden_states, got {tuple(ids_shape)} and {tuple(top_k_weights.shape)}"
        )
    if not ids_shape[1]:
        raise InvalidInput("top_k_index must name at least one expert a token, got K = 0")
    for name, tensor in (("hidden_states", hidden_states), ("top_k_weights", top_k_weights)):
        if not tensor.is_floating_point():
            raise InvalidInput(f"{name} must be of a float dtype, got {tensor.dtype}")
    if x_shape[1] != weights.hidden_size:
        raise InvalidInput(
            f"hidden_states must have H = {weights.hidden_size} columns, as the weights do, got {x_shape[1]}"
        )
    devices = {hidden_states.device, top_k_index.device, top_k_weights.device, weights.device}
    if len(devices) > 1:
        raise InvalidInput(f"all tensors of a call must be on one device, got {sorted(map(str, devices))}")
    mixed = hidden_states.dtype != weights.dtype and not weights.quantized
    if mixed and not autocast_enabled(hidden_states.device.type):
        raise InvalidInput(
            f"hidden_states must have the dtype of the weights, {weights.dtype}, got {hidden_states.dtype};"
            " convert one of them, or run inside torch.autocast"
        )
