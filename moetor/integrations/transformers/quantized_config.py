"""Which loads are quantised ones, and what they were asked to do: the config that transformers carries around for us.

transformers chooses what to do with a quantised model by the `quant_method` of its config. Ours has a
name of its own, on a copy of the config; "fp8" or "mxfp4" are written back when the model is saved.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...core.errors import InvalidInput
from ...quantization import FineGrainedFP8Config
from .adapters import is_decorated

METHOD = "moetor"
_METHODS = ("fp8", "mxfp4")
# Keywords of a model that are no fields of its config, though configs have fields of these names.
_NOT_OF_THE_CONFIG = ("dtype", "torch_dtype", "quantization_config")


@register_quantization_config(METHOD)
class LoadConfig(QuantizationConfigMixin):
    """What transformers carries around for us: the entry of config.json, and what it means."""

    def __init__(
        self, saved: Mapping[str, Any], dense: Sequence[str] = (), origin: Any = None, quant_method: str = METHOD
    ) -> None:
        self.quant_method: Any = quant_method
        self.saved = dict(saved)  # as config.json has it, and will have it
        self.dense = list(dense)  # names of modules that a quantised checkpoint has, and that are to be dequantised
        self.origin = origin  # of the checkpoint, and the keywords that say where its files are

    @property
    def blocks(self) -> bool:
        """Whether experts are gpt-oss' MXFP4 blocks."""
        return bool(self.saved["quant_method"] == "mxfp4")

    @property
    def meaning(self) -> FineGrainedFP8Config:
        if not self.blocks:
            return FineGrainedFP8Config.of(self.saved)
        known = {name: self.saved[name] for name in ("dequantize", "modules_to_not_convert") if name in self.saved}
        return FineGrainedFP8Config(activation_scheme=None, scale_fmt="ue8m0", expert_dtype="fp4", **known)

    @property
    def dequantize(self) -> bool:
        return self.meaning.dequantize

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.saved)


def through_moetor(auto: Any, name_or_path: Any, keywords: dict[str, Any], hub: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `from_pretrained` with which moetor loads the model's experts, if quantised ones are in question.

    Args:
        auto: one of transformers' Auto classes.
        keywords: what the user gave; `quantization_config` may be ours or transformers'.
        hub: those of them that say where the config's files are.

    Returns:
        The same keywords where this is none of moetor's business: a dense model, another method of
        quantisation, or a model without experts.

    Raises:
        InvalidInput: `quantization_config` asks for what cannot be had.
    """
    asked, config = keywords.get("quantization_config"), keywords.get("config")
    if isinstance(config, PretrainedConfig):
        fields = config.to_dict()
    else:
        fields, _ = PretrainedConfig.get_config_dict(name_or_path if config is None else config, **hub)
    entry = _entry(fields) or _entry(fields.get("text_config") or {})
    ours = isinstance(asked, FineGrainedFP8Config)
    if ours and entry is not None:
        _require_same_method(asked, entry)
    if not _is_fp8(asked) if entry is None else entry.get("quant_method") not in _METHODS:
        return keywords
    if not isinstance(config, PretrainedConfig):
        config = transformers.AutoConfig.from_pretrained(name_or_path if config is None else config, **hub)
    config = copy.deepcopy(config)
    if not _has_experts(auto, config, hub):
        if ours:
            raise InvalidInput(
                f"{type(config).__name__} has no experts that moetor quantises; pass transformers' config"
            )
        return keywords
    rest = {name: value for name, value in keywords.items() if name not in ("config", "quantization_config")}
    # transformers gives keywords to the config only where it makes the config itself
    for name in [name for name in rest if name in vars(config) and name not in _NOT_OF_THE_CONFIG]:
        setattr(config, name, rest.pop(name))
    if entry is None:
        return rest | {"config": config, "quantization_config": LoadConfig(_on_the_fly(asked).to_dict())}
    # of a quantised checkpoint one may ask what its numbers do not depend on
    if asked is not None:
        _require_same_method(asked, entry)
    saved = entry | {name: value for name in ("dequantize", "modules_to_convert") if (value := _get(asked, name))}
    dense = _get(asked, "modules_to_not_convert") or _get(asked, "ignored_layers") or ()
    config.quantization_config = {"quant_method": METHOD, "saved": saved, "dense": dense, "origin": (name_or_path, hub)}
    return rest | {"config": config}


def _entry(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of a config.json; DeepSeek-V4's has one of its fields a level higher."""
    entry = fields.get("quantization_config")
    if entry is None:
        return None
    entry = dict(entry if isinstance(entry, Mapping) else entry.to_dict())
    if entry.get("quant_method") == "fp8" and fields.get("expert_dtype"):
        entry.setdefault("expert_dtype", fields["expert_dtype"])
    return entry


def _is_fp8(asked: Any) -> bool:
    method = _get(asked, "quant_method")
    return isinstance(asked, FineGrainedFP8Config) or getattr(method, "value", method) == "fp8"


def _on_the_fly(asked: Any) -> FineGrainedFP8Config:
    config = FineGrainedFP8Config.of(asked)
    if config.activation_scheme == "static":
        raise InvalidInput("quantising while loading has no calibration for activation_scheme='static'; use 'dynamic'")
    if config.dequantize:
        raise InvalidInput("dequantize=True needs a checkpoint that is quantised, and this one is not")
    if config.modules_to_convert:
        raise InvalidInput("modules_to_convert are embeddings of a quantised checkpoint, and this one is not")
    return config


def _require_same_method(asked: Any, entry: Mapping[str, Any]) -> None:
    method = "fp8" if isinstance(asked, FineGrainedFP8Config) else _get(asked, "quant_method")
    of_checkpoint = entry.get("quant_method")
    if getattr(method, "value", method) not in ("fp8", of_checkpoint) or of_checkpoint not in _METHODS:
        raise InvalidInput(f"the checkpoint is quantised by {of_checkpoint!r}, got a config of {method!r}")


def _get(asked: Any, name: str) -> Any:
    """A field of a config given as an object or a dict; None where there is none."""
    return asked.get(name) if isinstance(asked, dict) else getattr(asked, name, None)


def _has_experts(auto: Any, config: PretrainedConfig, hub: dict[str, Any]) -> bool:
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    remote = {name: hub[name] for name in ("trust_remote_code", "code_revision") if name in hub}
    with torch.device("meta"):
        skeleton = auto.from_config(plain, **remote)
    return any(is_decorated(module) for module in skeleton.modules())
