"""Quantised models through transformers' own loader: checkpoints that are quantised, and any MoE model on the fly.

transformers reads, renames, stacks, shards and places the tensors, and asks what is told here. Experts
stay as they are stored; all other matrices are dequantised while they are read, one by one.
"""

import re
from collections.abc import Container
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform
from transformers.integrations.finegrained_fp8 import replace_with_fp8_embedding
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...core.errors import CheckpointError, InvalidInput
from ...core.formats import FORMATS
from .adapters import is_decorated
from .checkpoint_files import listed, packed_tensors, unreadable_matrices
from .quantized_config import METHOD, LoadConfig
from .quantized_experts import Stored, make_room, put_dense, settle, stored_in
from .quantized_ops import SCALE, STATIC, AsMatrices, Dequantize, Quantize, StackStatic


def notes_on(model: PreTrainedModel) -> list[str]:
    """What loading has done to a quantised model besides its experts, in sentences."""
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, _Quantizer) or not (done := quantizer.dequantize_others.done):
        return []
    dtype = str(quantizer.dtype).removeprefix("torch.")
    return [f"{len(done)} quantised matrices that are no experts were dequantised to {dtype}"]


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    """What transformers asks while it loads a model for us."""

    requires_calibration = False
    is_trainable = True  # adapters on top of frozen experts
    is_compileable = True

    quantization_config: LoadConfig

    def __init__(self, quantization_config: LoadConfig, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)
        self.meaning = quantization_config.meaning
        self.dequantize_others = Dequantize(self.meaning)
        # parameters of quantised experts, with how their module holds them
        self.parameters: dict[str, Stored] = {}
        self.lines = ""  # their names, one a line
        self.all_names: set[str] = set()
        # modules of experts that the checkpoint has dense, and those that are made so
        self.dense_in_files: list[str] = []
        self.made_dense: list[str] = []

    def validate_environment(self, device_map: Any = None, **_: Any) -> None:
        disk = isinstance(device_map, dict) and "disk" in device_map.values()
        if disk and (self.meaning.dequantize or not self.pre_quantized):
            raise InvalidInput("experts that are offloaded to disk cannot be quantised or dequantised while loading")

    def is_serializable(self) -> bool:
        return True

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        # of a quantised checkpoint as well: it keeps transformers from comparing shapes, which `settle` does
        return param_name in self.parameters

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        stored = self.parameters.get(param_name)
        if stored is None or param_name.endswith((SCALE, STATIC, "_scales")):
            return float(param.element_size())
        format = FORMATS[stored.format]
        if self.meaning.dequantize:
            return 2.0 * format.per_element
        return format.bits / 8 if not self.pre_quantized else float(param.element_size())

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        # what is loaded into quantised experts is looked at as it is stored, by `settle`
        if any(_ends_a_name(target, self.lines) for target in converter.target_patterns):
            return None
        kept: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return kept

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize()

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        skipped = _own_names(model, self.meaning.modules_to_not_convert or [])
        made_dense = _own_names(model, self.quantization_config.dense)
        self.all_names = set(model.state_dict())
        for name, module in list(model.named_modules()):
            if not is_decorated(module):
                continue
            if not should_convert_module(name, skipped):
                self.dense_in_files.append(name)
                continue
            if self.meaning.dequantize or not should_convert_module(name, made_dense):
                self.made_dense.append(name)
            try:
                make_room(
                    module,
                    self.meaning.expert_format,
                    blocks=self.quantization_config.blocks,
                    keep_dense=not self.pre_quantized,
                )
            except InvalidInput as error:
                raise InvalidInput(f"{name}.{error}") from None
            stored = stored_in(module)
            assert stored is not None
            self.parameters |= {f"{name}.{parameter}": stored for parameter in stored.all_names()}
        self.lines = "\n".join(self.parameters)
        if self.pre_quantized and self.meaning.modules_to_convert:
            replace_with_fp8_embedding(model, self.meaning.modules_to_convert, skipped)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: Any = None
    ) -> list[WeightTransform]:
        if not self.pre_quantized:
            return list(weight_conversions)
        out: list[WeightTransform] = []
        for conversion in weight_conversions:
            out += [*self._companions(conversion), conversion]
        return [
            *_renamed_scales(self.all_names),
            *out,
            WeightConverter([*Dequantize.PATTERNS], "weight", [self.dequantize_others]),
        ]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        problems = list(self.dequantize_others.problems)
        if self.pre_quantized:
            # older releases of transformers have converted such a matrix before an operation could see it
            origin = self.quantization_config.origin
            fault = unreadable_matrices(*origin) or self._taken_for_dense(model, packed_tensors(*origin))
            problems = problems or ([fault] if fault else [])
            self.quantization_config.origin = None
        for name, module in model.named_modules():
            if stored_in(module) is None:
                continue
            try:
                settle(module, uint8_is_e8m0=self.meaning.scale_fmt == "ue8m0")
            except InvalidInput as error:
                problems.append(f"does not fit: {name}.{error}")
            else:
                if name in self.made_dense:
                    put_dense(module, self.dtype)
        if self.pre_quantized and not hasattr(HfQuantizer, "get_new_dtype"):
            _put_in_planned_dtypes(model, self.dtype, self.parameters.keys())
        if problems:
            raise CheckpointError(f"checkpoint {model.name_or_path!r} {listed(problems)}")
        if self.meaning.dequantize:
            # saved as any dense model of its kind
            model.__dict__.pop("_weight_conversions", None)
        else:
            self._remember_what_is_dense(model)
        return model

    def _companions(self, conversion: WeightTransform) -> list[WeightTransform]:
        return _companions(conversion, self.parameters, self.dequantize_others.problems)

    def _taken_for_dense(self, model: PreTrainedModel, keys: list[str]) -> str | None:
        """Payload that the config calls dense: its numbers would be taken for weights, without their scales."""
        parts = tuple(f"{name}." for name in self.dense_in_files)
        wrong = [key for key, own in zip(keys, _renamed(model, keys), strict=True) if own.startswith(parts)]
        return f"has quantised experts where its config says that they are not: {listed(wrong)}" if wrong else None

    def _remember_what_is_dense(self, model: PreTrainedModel) -> None:
        """For saving: matrices that are dense now are saved so, and the config says which they are."""
        used = getattr(model, "_weight_conversions", None) or []
        kept = _as_saved([conversion for conversion in used if not _has(conversion, Dequantize)])
        if not self.pre_quantized:
            kept += [twin for conversion in kept for twin in self._companions(conversion)]
        # they are reversed in reverse order, and scales must come first then, too
        cast(Any, model)._weight_conversions = sorted(
            kept, key=lambda conversion: _has(conversion, AsMatrices, StackStatic)
        )
        linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if self.pre_quantized:
            linears |= {name.removesuffix(".weight") for name in self.dequantize_others.done}
        saved, kept_dense = self.quantization_config.saved, self.meaning.modules_to_not_convert or ()
        saved["modules_to_not_convert"] = sorted({*linears, *self.made_dense, *kept_dense}) or None


def _ends_a_name(pattern: str, names: str) -> bool:
    return re.search(f"{pattern}$", names, re.MULTILINE) is not None


def _has(conversion: WeightTransform, *kinds: type[ConversionOps]) -> bool:
    return any(isinstance(operation, kinds) for operation in getattr(conversion, "operations", ()))


def _put_in_planned_dtypes(model: PreTrainedModel, dtype: torch.dtype, stored: Container[str]) -> None:
    """Older releases of transformers leave what was renamed, in a quantised checkpoint, in the dtype of the files."""
    planned = {part.replace("*", ".*"): kept for part, kept in model._get_dtype_plan(dtype).items()}
    for name, parameter in model.named_parameters():
        if name not in stored and parameter.is_floating_point() and parameter.itemsize > 1:
            wanted = next((kept for part, kept in planned.items() if re.search(part, name)), dtype)
            parameter.data = parameter.data.to(wanted)


def _own_names(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Names of modules as the model has them, from those that its checkpoints may use."""
    renamed = _renamed(model, [f"{name}." for name in names])
    return [*names, *(name.removesuffix(".") for name in renamed)]


def _renamed(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Names of tensors as the model has them; those of single experts become that of the stack."""
    out, conversions = [], get_model_conversion_mapping(model) if names else []
    for name in names:
        for conversion in conversions:
            name, _ = conversion.rename_source_key(name)
        out.append(name)
    return out


def _companions(
    conversion: WeightTransform, parameters: dict[str, Stored], problems: list[str]
) -> list[WeightTransform]:
    """For the scales that belong to what this one stacks or renames, if those are parameters of the model.

    They come before it: its patterns match the beginnings of their names in older releases.
    """
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    if len(targets) != 1 or not all(source.endswith("weight") for source in sources):
        return []
    twins: list[WeightTransform] = []
    for suffix, patterns in (
        (SCALE, [source + SCALE for source in sources]),
        (f"_{STATIC}", [source.removesuffix("weight") + STATIC for source in sources]),
    ):
        name = next((name for name in parameters if re.search(f"{targets[0]}{suffix}$", name)), None)
        if name is None:
            continue
        if isinstance(conversion, WeightConverter):
            _, N, K = parameters[name].sizes[name.rsplit(".", 1)[-1].removesuffix(suffix)]
            shape = FORMATS[parameters[name].format].scale_shape(N // len(sources), K)
            operations: list[ConversionOps] = [StackStatic(problems)]
            if suffix == SCALE:
                operations = [AsMatrices(shape), *conversion.operations]
            twins.append(WeightConverter(patterns, targets[0] + suffix, operations))
        else:
            twins.append(WeightRenaming(patterns, targets[0] + suffix))
    for twin in twins:
        twin.scope_prefix, twin.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return twins


# Other names that checkpoints have for scales.
_OTHER_SCALES = {".scale": r"^(.+)\.scale", ".qscale_weight": r"^(.+)\.qscale_weight"}


def _renamed_scales(parameters: set[str]) -> list[WeightRenaming]:
    """Other names of scales, except of modules that have a parameter of such a name: a norm's scale is none."""
    renamings = []
    for suffix, pattern in _OTHER_SCALES.items():
        owners = sorted({name.removesuffix(suffix).rsplit(".", 1)[-1] for name in parameters if name.endswith(suffix)})
        others = "".join(rf"(?<!\.{owner})" for owner in owners)
        renamings.append(WeightRenaming(pattern.replace(r")\.", rf"){others}\."), r"\1.weight_scale_inv"))
    return renamings


def _as_saved(conversions: list[WeightTransform]) -> list[WeightTransform]:
    """The same, but renamings of scales without what only tells names apart while loading.

    Older releases of transformers lose the beginnings of names if they are renamed after experts
    have been taken apart; there scales are saved under the name that they have in the model.
    """
    kept = []
    for conversion in conversions:
        sources = conversion._original_source_patterns
        plain = [pattern for suffix, pattern in _OTHER_SCALES.items() if sources[0].endswith(f"\\{suffix}")]
        if not plain:
            kept.append(conversion)
        elif hasattr(core_model_loading, "apply_renamings"):
            kept.append(WeightRenaming(plain[0], r"\1.weight_scale_inv"))
    return kept
