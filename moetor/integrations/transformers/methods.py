"""Give a transformers model its experts backends: `attach`, and the methods it adds.

Decorated experts call whatever function their config names; each experts module gets a copy of
its config that names ours. The class of the model and of every nested model is exchanged for a
subclass of the same name with the methods below; the subclass is made anew by unpickling.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...core.errors import InvalidInput
from ...core.interface import ExpertsInterface
from ...forward import experts_forward
from . import decode, log, prepared
from .adapters import SEAM, experts_of
from .choice import CHOICE, Choice, backend_of, current, experts_by_key, plan, set_backend, unreadable
from .explain import ModelExplanation, explain_model
from .quantized_experts import stored_in
from .state_dict import as_model_has_it


def run_experts(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor | None = None,
    top_k_weights: Tensor | None = None,
    router_indices: Tensor | None = None,
    routing_weights: Tensor | None = None,
) -> Tensor:
    """The forward of an experts module, as transformers' interface calls it; two models name theirs otherwise."""
    index = router_indices if top_k_index is None else top_k_index
    weights = routing_weights if top_k_weights is None else top_k_weights
    if index is None or weights is None:
        raise InvalidInput(f"{type(module).__name__} needs the chosen experts and their weights of each token")
    experts = prepared.with_prepared(module, experts_of(module))
    name = module.__dict__.get(CHOICE) or backend_of(module)
    backend = decode.running(module, name, experts, index.numel(), hidden_states.device)
    return experts_forward(experts, hidden_states, index, weights, backend)


class ExpertsMethods:
    """What `attach` adds to a model's class, and to that of every nested model."""

    def set_experts_implementation(self: Any, experts_implementation: Choice) -> None:
        """Choose the backend of the experts, now, without reloading.

        Args:
            experts_implementation: a name for all, or a dict from sub-config to name: "" is
                everything not named otherwise, dots reach nested ones ("thinker_config.text_config").

        Raises:
            UnknownBackend, BackendUnavailable, InvalidInput: see `choice.plan`; nothing is changed.
        """
        before = current(self)
        for module, name in plan(self, experts_implementation):
            set_backend(module, name)
        log.changed(self, before)

    def get_experts_implementation(self: Any) -> dict[str, str]:
        """The backend of this model ("") and of each sub-config, in the form that `set` accepts.

        Inside a running `generate` (a streamer, a stopping criterion) that is what runs in its phase; see `decode`.
        """
        return current(self, decode.shown)

    def prepare_experts(self: Any) -> int:
        """Lay frozen, quantised experts out for the backends that are chosen, where those read an order of their own.

        What is laid out is a copy, and takes memory as such; experts run by it until `load_state_dict`, `.to()` or a
        change of the weights drops it. Then, and for another backend, prepare again.

        Returns:
            The number of experts modules that have such a copy now.

        Raises:
            InvalidInput: weights that require a gradient.
            BackendUnavailable, BackendRefused: the device, or the backend, cannot.
        """
        modules = [module for modules in experts_by_key(self).values() for module in modules]
        return sum(prepared.prepare(module, backend_of(module)) for module in modules if not unreadable(module))

    def explain_experts(self: Any) -> ModelExplanation:
        """What runs where, and why every other backend does not."""
        return explain_model(self)

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in PyTorch; a dict with one tensor per expert, as files have it, is stacked first.

        Raises:
            CheckpointError: see `state_dict.as_model_has_it`.
        """
        prepared.drop(self)
        whole = as_model_has_it(self, type(self)._moetor_base, state_dict)
        return super().load_state_dict(whole, strict=strict, assign=assign)  # type: ignore[misc]

    @property
    def dtype(self: Any) -> torch.dtype:
        """Of the first parameter that is no payload; configs are saved with it."""
        first: torch.dtype = super().dtype  # type: ignore[misc]
        if first.itemsize > 1:
            return first
        return next((p.dtype for p in self.parameters() if p.is_floating_point() and p.itemsize > 1), first)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch; no dtype where experts are quantised, whose payload and scales it would convert.

        Raises:
            InvalidInput: such a dtype.
        """
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        if dtype is not None and any(stored_in(module) is not None for module in self.modules()):
            raise InvalidInput(
                f"{type(self).__name__} holds quantised experts, which keep their dtype, got .to({dtype});"
                " load it with dtype= instead"
            )
        return super().to(*args, **kwargs)  # type: ignore[misc]

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        # what .to(), .cuda(), .half() and the like come to
        prepared.drop(self)
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _optimize_model_for_decode(self: Any) -> Iterator[None]:
        # transformers would switch grouped_mm to batched_mm here, whatever the batch size; `decode` does it for us.
        yield

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _empty, (type(self)._moetor_base,), self.__getstate__()


_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _with_methods(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    if base in _CLASSES:
        return _CLASSES[base]
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    _CLASSES[base] = type(base.__name__, (ExpertsMethods, base), {**names, "_moetor_base": base})
    return _CLASSES[base]


def _empty(base: type[PreTrainedModel]) -> PreTrainedModel:
    """An instance without state, for unpickling and deepcopy."""
    cls = _with_methods(base)
    return cls.__new__(cls)


def attach(model: PreTrainedModel, experts_implementation: Choice = "auto") -> PreTrainedModel:
    """Run the experts of a transformers model, whoever loaded it, through moetor.

    Args:
        model: changed in place: its class, and that of every model inside, gains the methods of
            `ExpertsMethods`. Attach the outermost one: of a model around it, transformers' own
            methods stay, which moetor's experts do not follow.
        experts_implementation: see `ExpertsMethods.set_experts_implementation`; what it does not
            name runs by "auto".

    Returns:
        The same model.

    Raises:
        InvalidInput: not a transformers model; it has no experts and a backend other than eager
            was named; or moetor cannot read its experts, and "eager", which leaves them to
            transformers, was not named for them.
        UnknownBackend, BackendUnavailable: see `choice.plan`; the model is left as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidInput(f"attach needs a transformers PreTrainedModel, got {type(model).__name__}")
    before = current(model) if isinstance(model, ExpertsMethods) else None
    for module, name in plan(model, experts_implementation, otherwise="auto"):
        set_backend(module, name)
    for nested in model.modules():
        if isinstance(nested, PreTrainedModel) and not isinstance(nested, ExpertsMethods):
            nested.__class__ = _with_methods(type(nested))
    if before is None:
        log.attached(model)
    else:
        log.changed(model, before)
    return model


# For plain transformers: experts_implementation="moetor" runs auto, "moetor:eager" and so on the backend of that name.
for _name in (SEAM, *(f"{SEAM}:{_backend}" for _backend in ExpertsInterface.names())):
    ALL_EXPERTS_FUNCTIONS.register(_name, run_experts)
