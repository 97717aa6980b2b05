"""transformers' Auto classes, with `experts_implementation` understood by moetor."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.peft_utils import find_adapter_config_file

from . import quantized_loading as _quantized_loading  # noqa: F401  registers what through_moetor names
from .checkpoint import explained, require_fit
from .choice import Choice, plan, require_known
from .methods import attach
from .quantized_config import through_moetor

# What decides which files a config comes from; the rest of the keywords is the model's.
_HUB_KEYWORDS = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


class _Auto:
    """Shared by the classes below, each of which stands for the one of its name in transformers."""

    _peer: str

    def __init__(self) -> None:
        raise OSError(f"{type(self).__name__} is made by `from_pretrained` or `from_config`, not by calling it")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        experts_implementation: Choice = "auto",
        **kwargs: Any,
    ) -> Any:
        """Load a model as transformers does, with its experts run by moetor.

        Args:
            pretrained_model_name_or_path: a folder or a hub id.
            experts_implementation: a backend's name, or a dict from sub-config to name; see
                `set_experts_implementation`.
            model_args, kwargs: as in transformers. `quantization_config` may be a
                `moetor.FineGrainedFP8Config` or transformers' own; a checkpoint that is quantised in FP8 or
                MXFP4 needs none, and its experts stay as they are, on every device.

        Returns:
            The model, or (model, loading info) with `output_loading_info=True`.

        Raises:
            UnknownBackend, BackendUnavailable, InvalidInput: before anything is loaded.
            CheckpointError: a file that is missing or cannot be read, experts that the checkpoint lacks,
                or tensors of another shape than the model's.
        """
        require_known(experts_implementation)
        if experts_implementation not in ("auto", "eager"):
            cls._require_fitting(pretrained_model_name_or_path, experts_implementation, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        hub = {name: kwargs[name] for name in _HUB_KEYWORDS if name in kwargs}
        kwargs = through_moetor(cls._transformers(), _base_model(pretrained_model_name_or_path, hub), kwargs, hub)
        with explained(pretrained_model_name_or_path, kwargs):
            # Told to ignore shapes that differ, transformers says which they are.
            model, info = cls._transformers().from_pretrained(
                pretrained_model_name_or_path,
                *model_args,
                output_loading_info=True,
                **{**kwargs, "ignore_mismatched_sizes": True},
            )
        require_fit(model, info, pretrained_model_name_or_path, kwargs)
        attach(model, experts_implementation)
        return (model, info) if wants_info else model

    @classmethod
    def from_config(cls, config: Any, *, experts_implementation: Choice = "auto", **kwargs: Any) -> Any:
        """Build a model with random weights from a config, with its experts run by moetor.

        Raises:
            UnknownBackend, BackendUnavailable, InvalidInput: see `from_pretrained`.
        """
        require_known(experts_implementation)
        return attach(cls._transformers().from_config(config, **kwargs), experts_implementation)

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> None:
        """Register a config and model class, as with transformers' class."""
        cls._transformers().register(*args, **kwargs)

    @classmethod
    def _transformers(cls) -> Any:
        return getattr(transformers, cls._peer)

    @classmethod
    def _require_fitting(cls, name_or_path: Any, choice: Choice, kwargs: dict[str, Any]) -> None:
        """Raise for keys or backends that do not fit the model, from its skeleton, before its weights are read."""
        config = kwargs.get("config")
        hub = {name: kwargs[name] for name in _HUB_KEYWORDS if name in kwargs}
        if config is None:
            config = transformers.AutoConfig.from_pretrained(_base_model(name_or_path, hub), **hub)
        elif isinstance(config, str):
            config = transformers.AutoConfig.from_pretrained(config, **hub)
        remote = {name: hub[name] for name in ("trust_remote_code", "code_revision") if name in hub}
        with torch.device("meta"):
            # a copy: building a model writes into the config, which may be the caller's
            skeleton = cls._transformers().from_config(copy.deepcopy(config), **remote)
        plan(skeleton, choice)


def _base_model(name_or_path: Any, hub: dict[str, Any]) -> Any:
    """The model that a PEFT adapter is for, if this is the folder or hub id of one; else itself."""
    places = {name: value for name, value in hub.items() if name not in ("trust_remote_code", "code_revision")}
    adapter = find_adapter_config_file(name_or_path, **places)
    if adapter is None or (Path(name_or_path) / "config.json").exists():  # a whole model may hold one as well
        return name_or_path
    return json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"]


class AutoModel(_Auto):
    """transformers.AutoModel with moetor's experts."""

    _peer = "AutoModel"


class AutoModelForCausalLM(_Auto):
    """transformers.AutoModelForCausalLM with moetor's experts."""

    _peer = "AutoModelForCausalLM"


class AutoModelForImageTextToText(_Auto):
    """transformers.AutoModelForImageTextToText with moetor's experts."""

    _peer = "AutoModelForImageTextToText"


class AutoModelForMultimodalLM(_Auto):
    """transformers.AutoModelForMultimodalLM with moetor's experts."""

    _peer = "AutoModelForMultimodalLM"


class AutoModelForSeq2SeqLM(_Auto):
    """transformers.AutoModelForSeq2SeqLM with moetor's experts."""

    _peer = "AutoModelForSeq2SeqLM"
