"""Which loads are quantised ones, and what they were asked to do: the config that transformers carries around for us.

transformers chooses what to do with a quantised model by the `quant_method` of its config. Ours has a
name of its own, on a copy of the config; "fp8" or "mxfp4" are written back when the model is saved.
"""

import copy
from collections.abc import Mapping
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

    def __init__(self, saved: Mapping[str, Any], origin: Any = None, quant_method: str = METHOD) -> None:
        self.quant_method: Any = quant_method
        self.saved = dict(saved)  # as config.json has it, and will have it
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
    entry = fields.get("quantization_config") or (fields.get("text_config") or {}).get("quantization_config")
    ours = isinstance(asked, FineGrainedFP8Config)
    if (entry or {}).get("quant_method", "fp8") not in _METHODS or (entry is None and not _is_fp8(asked)):
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
    if entry is None:
        return rest | {"config": config, "quantization_config": LoadConfig(_on_the_fly(asked).to_dict())}
    for name in [name for name in rest if name in vars(config) and name not in _NOT_OF_THE_CONFIG]:
        setattr(config, name, rest.pop(name))
    saved = entry | _loading_attributes(asked, entry)
    config.quantization_config = {"quant_method": METHOD, "saved": saved, "origin": (name_or_path, hub)}
    return rest | {"config": config}


def _is_fp8(asked: Any) -> bool:
    method = asked.get("quant_method") if isinstance(asked, dict) else getattr(asked, "quant_method", None)
    return isinstance(asked, FineGrainedFP8Config) or getattr(method, "value", method) == "fp8"


def _on_the_fly(asked: Any) -> FineGrainedFP8Config:
    config = FineGrainedFP8Config.of(asked)
    if config.activation_scheme == "static":
        raise InvalidInput("quantising while loading has no calibration for activation_scheme='static'; use 'dynamic'")
    if config.dequantize:
        raise InvalidInput("dequantize=True needs a checkpoint that is quantised, and this one is not")
    return config


def _loading_attributes(asked: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the user's config changes of a quantised checkpoint's own: nothing that its numbers depend on."""
    if asked is None:
        return {}
    get = asked.get if isinstance(asked, dict) else lambda name: getattr(asked, name, None)
    method = "fp8" if isinstance(asked, FineGrainedFP8Config) else get("quant_method")
    if getattr(method, "value", method) not in ("fp8", entry["quant_method"]):
        raise InvalidInput(f"the checkpoint is quantised by {entry['quant_method']!r}, got a config of {method!r}")
    return {name: value for name in ("dequantize", "modules_to_not_convert") if (value := get(name))}


def _has_experts(auto: Any, config: PretrainedConfig, hub: dict[str, Any]) -> bool:
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    remote = {name: hub[name] for name in ("trust_remote_code", "code_revision") if name in hub}
    with torch.device("meta"):
        skeleton = auto.from_config(plain, **remote)
    return any(is_decorated(module) for module in skeleton.modules())
