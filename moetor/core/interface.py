"""Backends, their names, and the choice of one for a call.

A backend is data and functions: nothing to inherit, nothing to override. What it can do is asked
by `why_not`, and the same sentences feed selection, errors, `moetor doctor`, the documentation
and the reasons of skipped tests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .autocast import autocast_enabled
from .errors import BackendRefused, BackendUnavailable, InvalidInput, unknown_name
from .weights import ExpertWeights

Forward = Callable[[ExpertWeights, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """What a backend may know of a call when it is asked: metadata, never values.

    Attributes:
        num_tokens, top_k, hidden_size: T, K, H.
        dtype: that the products run in: the dtype of hidden_states, or autocast's.
        device: of every tensor of the call.
        needs_grad: whether any input or weight may need a gradient from this call.
        compiling: whether torch.compile or torch.export is tracing.
        capturing: whether a CUDA graph is being captured.
        autocast: whether torch.autocast is on for the device.
    """

    num_tokens: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool = False
    compiling: bool = False
    capturing: bool = False
    autocast: bool = False

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k


def describe_call(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Call:
    """The metadata of one call; see `Call`."""
    compiling = torch.compiler.is_compiling()
    (T, H), dtype, device = hidden_states.shape, hidden_states.dtype, hidden_states.device
    device_type = device.type
    autocast = autocast_enabled(device_type)
    if autocast and dtype != torch.float64:  # which is not autocast's business
        dtype = torch.get_autocast_dtype(device_type)
    needs_grad = torch.is_grad_enabled() and (
        hidden_states.requires_grad
        or top_k_weights.requires_grad
        or any(tensor.requires_grad for tensor in weights.tensors())
    )
    if not compiling:
        # forward-mode derivatives need no tensor to require a gradient
        needs_grad = needs_grad or torch.autograd.forward_ad._current_level >= 0
    capturing = device_type == "cuda" and not compiling and torch.cuda.is_current_stream_capturing()
    return Call(T, top_k_index.shape[1], H, dtype, device, needs_grad, compiling, capturing, autocast)


def _always(*_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run experts.

    Attributes:
        name: what users write.
        forward: (weights, hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K)) -> (T, H).
            Called only where both reasons below are None.
        machine_why_not: (device) -> why this device and what is installed here cannot run it, or None.
        why_not: (weights, call) -> why it cannot run this call, or None. Reads metadata only.
        prepare: (weights) -> weights laid out for this backend, for frozen quantised weights; see
            `ExpertsInterface.prepare`.
        load: (device) -> None; fetches what is not installed, where that device could run it. Called
            when somebody chooses the backend, never by a call of a layer.
        choose: (weights, call) -> another backend; for a name that stands for a policy.
        how: (weights, call) -> by what code a call that it runs would run, or of a policy, by what it chooses, in
            some words for `explain`; or None.
        summary: one line for tables.
    """

    name: str
    forward: Forward
    machine_why_not: Callable[[torch.device], str | None] = _always
    why_not: Callable[[ExpertWeights, Call], str | None] = _always
    prepare: Callable[[ExpertWeights], ExpertWeights] | None = None
    load: Callable[[torch.device], None] = _always
    choose: "Callable[[ExpertWeights, Call], Backend] | None" = None
    how: Callable[[ExpertWeights, Call], str | None] = _always
    summary: str = ""

    def refusal(self, weights: ExpertWeights, call: Call) -> str | None:
        """The first reason against this call, machine first; None: it runs."""
        return self.machine_why_not(call.device) or self.why_not(weights, call)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which backend a call gets, why not each of the others, and how those run it that have something to say of it."""

    requested: str
    chosen: str | None
    reasons: dict[str, str | None]
    how: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        reasons, how = dict(self.reasons), dict(self.how)
        return {"requested": self.requested, "chosen": self.chosen, "reasons": reasons, "how": how}

    def __str__(self) -> str:
        lines = [f"{self.requested} -> {self.chosen}" if self.chosen else f"{self.requested} cannot run this call"]
        if self.requested in self.how and self.requested not in self.reasons:
            lines.append(f"  {self.requested}: {self.how[self.requested]}")
        for name, reason in self.reasons.items():
            lines.append(f"  {name}: {reason or ', '.join(['can run', *filter(None, [self.how.get(name)])])}")
        return "\n".join(lines)


class BackendRegistry:
    """Backends by name. moetor has one, `ExpertsInterface`."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    def register(self, name: str, backend: "Backend | Forward", *, replace: bool = False) -> Backend:
        """Add a backend under a name.

        Args:
            name: what users will write.
            backend: a `Backend`, or a bare function with the signature of `Backend.forward`,
                which then is asked for nothing and must run or raise.
            replace: allow a name that is taken.

        Raises:
            InvalidInput: the name is taken or empty, or a Backend of another name was given.
        """
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"a backend's name must be a non-empty string, got {name!r}")
        if name in self._backends and not replace:
            raise InvalidInput(f"experts backend {name!r} is registered already; pass replace=True to replace it")
        if not isinstance(backend, Backend):
            if not callable(backend):
                raise InvalidInput(f"a backend must be a Backend or a function, got {type(backend).__name__}")
            backend = Backend(name, backend)
        if backend.name != name:
            raise InvalidInput(f"backend {backend.name!r} cannot be registered as {name!r}; the names must agree")
        self._backends[name] = backend
        return backend

    def unregister(self, name: str) -> None:
        """Forget a backend."""
        del self._backends[self[name].name]

    def names(self) -> tuple[str, ...]:
        """All names, in the order they were registered."""
        return tuple(self._backends)

    def __getitem__(self, name: str) -> Backend:
        if not isinstance(name, str) or name not in self._backends:
            raise unknown_name("experts backend", name, self._backends)
        return self._backends[name]

    def __contains__(self, name: object) -> bool:
        return name in self._backends

    def select(self, weights: ExpertWeights, call: Call, name: str) -> Backend:
        """The backend that runs this call: the one named, or the one a policy chooses.

        Raises:
            UnknownBackend: no backend has this name.
            BackendUnavailable: the call's device cannot run it.
            BackendRefused: it cannot run this call.
        """
        backend = self[name]
        if reason := backend.machine_why_not(call.device):
            raise BackendUnavailable(f"experts backend {name!r} cannot run on {call.device}: {reason}")
        if reason := backend.why_not(weights, call):
            raise BackendRefused(f"experts backend {name!r} cannot run this call: {reason}")
        return backend if backend.choose is None else backend.choose(weights, call)

    def load(self, name: str, device: torch.device | str = "cuda") -> None:
        """Fetch a backend's kernels, if they are neither installed nor loaded, for a device of this machine.

        Choosing the backend for a model does it as well; calls of a layer never do.

        Raises:
            UnknownBackend: no backend has this name.
            BackendUnavailable: the device cannot run it, or fetching failed.
        """
        backend, device = self[name], torch.device(device)
        backend.load(device)
        if reason := backend.machine_why_not(device):
            raise BackendUnavailable(f"experts backend {name!r} cannot run on {device}: {reason}")

    def prepare(self, weights: ExpertWeights, name: str) -> ExpertWeights:
        """The same layer with its frozen, quantised weights laid out for one backend as well.

        What is laid out is a copy: other backends go on reading the weights themselves, and whoever
        changes those prepares them anew. Weights that the backend reads as they are come back as they are.

        Args:
            weights: quantised, on the device that will run them.

        Raises:
            UnknownBackend: no backend has this name.
            BackendUnavailable: the weights' device cannot run it.
            InvalidInput: weights that are dense, or that need a gradient.
            BackendRefused: a format or layout that the backend cannot prepare.
        """
        backend = self[name]
        if reason := backend.machine_why_not(weights.device):
            raise BackendUnavailable(f"experts backend {name!r} cannot run on {weights.device}: {reason}")
        if not weights.quantized:
            raise InvalidInput(f"preparing needs quantised weights, which are frozen, got {weights.format}")
        if any(tensor.requires_grad for weight in weights.all for tensor in weight.frozen_tensors()):
            raise InvalidInput("preparing needs frozen weights, got some that require a gradient")
        return weights if backend.prepare is None else backend.prepare(weights)

    def explain(self, weights: ExpertWeights, call: Call, name: str = "auto") -> Explanation:
        """What `select` would do, with every backend's reason."""
        reasons = {
            backend.name: backend.refusal(weights, call) for backend in self._backends.values() if not backend.choose
        }
        chosen = None if self[name].refusal(weights, call) else self.select(weights, call, name).name
        able = [self[name] for name, reason in reasons.items() if reason is None]
        if self[name].choose and chosen:
            able.append(self[name])
        how = {backend.name: words for backend in able if (words := backend.how(weights, call))}
        return Explanation(name, chosen, reasons, how)


ExpertsInterface = BackendRegistry()
