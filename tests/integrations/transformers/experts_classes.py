"""Every experts class that the installed transformers decorates, each built alone from one config."""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers.models
from torch import nn
from transformers import PreTrainedConfig

from moetor.integrations.transformers.adapters import is_decorated

E, H, I = 5, 16, 12

# One size under all the names that configs have for it; limits and soft-caps low enough to matter.
SETTINGS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), H),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), I),
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), "silu"),
    **dict.fromkeys(("swiglu_limit", "mlp_gate_softcap", "mlp_up_softcap"), 0.5),
    "swiglu_alpha": 1.702,
    "moe_latent_size": None,
    "post_norm_eps": 1e-5,
}


def decorating_files() -> list[Path]:
    """The modeling files that use the decorator, by their text: what the search below must reach."""
    root = Path(transformers.models.__path__[0])
    files = sorted(root.glob("*/modeling_*.py"))
    return [path for path in files if "@use_experts_implementation" in path.read_text(encoding="utf-8")]


def experts_classes() -> Iterator[type[nn.Module]]:
    """The classes in those files whose instances moetor would take."""
    for path in decorating_files():
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, nn.Module) and is_decorated(cls.__new__(cls)):
                yield cls


def build(cls: type[nn.Module], **settings: object) -> nn.Module:
    """An experts module of this class that runs its own eager loop, with everything from N(0, 0.3)."""
    config = PreTrainedConfig(**{**SETTINGS, **settings})
    config._experts_implementation_internal = "eager"
    module = cls(config)
    if hasattr(module, "limit"):
        module.limit = 0.5  # older releases have it in the class
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module
