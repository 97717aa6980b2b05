"""moetor: the experts of Mixture-of-Experts models, by interchangeable backends."""

import importlib
from typing import TYPE_CHECKING, Any

from . import debug
from .core.activation import Activation
from .core.errors import (
    BackendRefused,
    BackendUnavailable,
    CheckpointError,
    InvalidInput,
    MoetorError,
    UnknownBackend,
)
from .core.formats import Format
from .core.interface import Backend, Call, ExpertsInterface
from .core.stacking import stack_experts
from .core.weights import ExpertWeights, Weight
from .forward import experts_forward
from .quantization import FineGrainedFP8Config

if TYPE_CHECKING:
    from . import nn
    from .integrations.transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
        attach,
    )

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
    "Backend",
    "BackendRefused",
    "BackendUnavailable",
    "Call",
    "CheckpointError",
    "ExpertWeights",
    "ExpertsInterface",
    "FineGrainedFP8Config",
    "Format",
    "InvalidInput",
    "MoetorError",
    "UnknownBackend",
    "Weight",
    "attach",
    "debug",
    "experts_forward",
    "nn",
    "stack_experts",
]

_NEED_TRANSFORMERS = {name for name in __all__ if name.startswith("AutoModel")} | {"attach"}


def __getattr__(name: str) -> Any:
    # transformers takes longer to import than all of the rest; only these names need it.
    if name in _NEED_TRANSFORMERS:
        from .integrations import transformers

        return getattr(transformers, name)
    if name in ("distributed", "nn", "testing"):
        return importlib.import_module(f"moetor.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
