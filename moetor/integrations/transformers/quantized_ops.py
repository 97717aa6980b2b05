"""What happens to tensors between a checkpoint and a quantised model, as operations of transformers' loader.

An operation gets {pattern: tensor or list of one tensor an expert} and returns the same form; its
reverse runs when the model is saved.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from ...core.errors import InvalidInput
from ...core.formats import FORMATS, Format, fp8, mxfp4
from ...quantization import FineGrainedFP8Config, dequantize, quantize
from .quantized_experts import stored_in

Tensors = dict[str, Any]
SCALE, STATIC = "_scale_inv", "activation_scale"


class AsMatrices(ConversionOps):
    """Scales of single experts, made matrices of one shape before they are stacked.

    Per-tensor checkpoints store scalars, and older releases of transformers save no dimension of size 1.
    """

    hf_quantizer = True  # tells transformers' loader to leave the dtypes of what it reads alone

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape

    def convert(self, input_dict: Tensors, *_: Any, **__: Any) -> Tensors:
        return {pattern: [self._matrix(tensor) for tensor in _listed(value)] for pattern, value in input_dict.items()}

    def _matrix(self, scale: Tensor) -> Tensor:
        squeezed = scale.dim() < 2 and scale.numel() == self.shape[0] * self.shape[1]
        return scale.reshape(self.shape) if squeezed else scale

    @property
    def reverse_op(self) -> ConversionOps:
        return _AsTheyAre()


class StackStatic(ConversionOps):
    """Static activation scales of single experts: (E,), or (E, 2) where gate and up have different ones.

    Args:
        problems: see `Dequantize`; where gate or up has none, the other's is not taken for it.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems

    def __deepcopy__(self, memo: Any) -> "StackStatic":
        return self  # see `Dequantize`

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str],
        full_layer_name: str = "", **_: Any,
    ) -> Tensors:  # fmt: skip
        if lacking := [pattern for pattern in source_patterns if pattern not in input_dict]:
            self.problems.append(f"lacks {', '.join(lacking)} for {full_layer_name}")
        columns = [torch.stack([one.reshape(()) for one in input_dict[p]]) for p in source_patterns if p in input_dict]
        alike = all(torch.equal(columns[0], column) for column in columns)
        return {target_patterns[0]: columns[0] if alike else torch.stack(columns, dim=1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _UnstackStatic()


class _UnstackStatic(ConversionOps):
    def convert(self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **_: Any) -> Tensors:
        (scale,) = (_listed(value)[0] for value in input_dict.values())
        columns = scale.unbind(1) if scale.dim() == 2 else [scale] * len(target_patterns)
        return {
            pattern.replace("*", str(expert)): one.clone()
            for pattern, column in zip(target_patterns, columns, strict=True)
            for expert, one in enumerate(column)
        }


class _AsTheyAre(ConversionOps):
    def convert(self, input_dict: Tensors, *_: Any, **__: Any) -> Tensors:
        return input_dict


class Dequantize(ConversionOps):
    """A matrix of a checkpoint and its scales as one dense matrix, in the dtype of the model's parameter.

    For what is no expert: blocks at the edges may be partial, and what has no scales passes as it is.

    Attributes:
        done: names of the parameters that were dequantised.
        problems: what was wrong, one sentence a parameter; an error raised here would be buried in a
            report by transformers.
    """

    PATTERNS = (r"(?<=\.)weight$", r"(?<=\.)weight_scale_inv", r"(?<=\.)activation_scale")
    hf_quantizer = True

    def __init__(self, config: FineGrainedFP8Config) -> None:
        self.config = config
        self.done: list[str] = []
        self.problems: list[str] = []

    def __deepcopy__(self, memo: Any) -> "Dequantize":
        return self  # transformers copies a converter for every parameter; the lists are for all of them

    def convert(self, input_dict: Tensors, *_: Any, full_layer_name: str = "", model: Any = None, **__: Any) -> Tensors:
        payload, scale = (_listed(input_dict[p])[0] if p in input_dict else None for p in self.PATTERNS[:2])
        owner, name = full_layer_name.rsplit(".", 1)
        empty = getattr(model.get_submodule(owner), name)
        if payload is None or (scale is None and payload.dtype.itemsize == 1 < empty.dtype.itemsize):
            lacks = full_layer_name if payload is None else f"the scales of {full_layer_name}"
            self.problems.append(f"lacks {lacks}")
            return {full_layer_name: torch.empty_like(empty, device="cpu")}
        if scale is None or empty.dtype.itemsize == 1:
            return {full_layer_name: payload.to(empty.dtype)}
        try:
            dense = _dequantized(full_layer_name, payload, _matrix(scale), self.config, empty.dtype)
        except InvalidInput as error:
            self.problems.append(f"does not fit: {error}")
            return {full_layer_name: torch.empty_like(empty, device="cpu")}
        self.done.append(full_layer_name)
        return {full_layer_name: dense}

    @property
    def reverse_op(self) -> ConversionOps:
        return _AsTheyAre()


class Quantize(ConversionOps):
    """Dense experts, as they have been read, in the format of their module; one expert at a time.

    Gate and up are quantised apart where a block would hold rows of both, as they are in
    checkpoints, which have a tensor for each.
    """

    def convert(self, input_dict: Tensors, *_: Any, model: Any = None, **__: Any) -> Tensors:
        out: Tensors = {}
        for full_name, value in input_dict.items():
            owner, name = full_name.rsplit(".", 1)
            module: Any = model.get_submodule(owner)
            stored = stored_in(module)
            assert stored is not None, "param_needs_quantization names no others"
            stack, format = _listed(value)[0], FORMATS[stored.format]
            halves = 2 if name == "gate_up_proj" and module.is_concatenated else 1
            if module.is_transposed:
                stack = stack.transpose(1, 2)
            payload_name, scale_name = stored.names(name)
            out[f"{owner}.{payload_name}"], out[f"{owner}.{scale_name}"] = _quantized(stack, format, halves)
        return out


def _quantized(stack: Tensor, format: Format, halves: int) -> tuple[Tensor, Tensor]:
    E, N, K = stack.shape
    payload = torch.empty(E, N, K // format.per_element, dtype=format.payload_dtypes[0], device=stack.device)
    scales = []
    for expert, matrix in enumerate(stack):
        parts = [quantize(half, format) for half in matrix.chunk(halves)]
        payload[expert] = torch.cat([part for part, _ in parts])
        scales.append(torch.cat([scale for _, scale in parts]))
    return payload, torch.stack(scales)


def _dequantized(name: str, payload: Tensor, scale: Tensor, config: FineGrainedFP8Config, dtype: torch.dtype) -> Tensor:
    if scale.dtype == torch.uint8 and config.scale_fmt != "ue8m0":
        raise InvalidInput(f"{name}{SCALE} is of uint8, which are exponents only where the config says 'ue8m0'")
    kind = "e8m0" if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else "float32"
    packed = payload.dtype in (torch.int8, torch.uint8)
    if payload.dtype.is_floating_point and payload.dtype.itemsize > 1:
        # transformers before 5.20 or so has converted it already, without its scale, which loses nothing
        payload = payload.to(torch.float8_e4m3fn)
    format = mxfp4(kind) if packed else fp8(config.weight_block_size or (0, 0), kind, None)
    if payload.dtype not in format.payload_dtypes:
        raise InvalidInput(f"{name} needs a payload of {format.payload_dtypes[0]}, got {payload.dtype}")
    needed = format.scale_shape(payload.shape[-2], payload.shape[-1] * format.per_element)
    if tuple(scale.shape) != needed:
        raise InvalidInput(
            f"{name} of shape {tuple(payload.shape)} needs {name}{SCALE} of shape {needed}, one scale a block of"
            f" {format.block}, got {tuple(scale.shape)}"
        )
    return dequantize(payload, scale, format, dtype)


def _matrix(scale: Tensor) -> Tensor:
    return scale.reshape(1, 1) if scale.numel() == 1 else scale


def _listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
