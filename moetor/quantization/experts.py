"""A layer's experts into a format and back: functions from ExpertWeights to ExpertWeights."""

from dataclasses import replace

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from ..core.formats import FORMATS, Format, mxfp4
from ..core.weights import ExpertWeights, Weight
from .matrices import dequantize, quantize


def quantize_experts(
    weights: ExpertWeights,
    format: Format | str,
    activation_scales: tuple[Tensor, Tensor] | None = None,
) -> ExpertWeights:
    """The same layer with its matrices in another format; biases and gate stay as they are.

    Matrices are quantised one expert at a time; beside the result, memory for one of them is
    needed. Weights stored (in, out) come back (out, in), as quantised ones always are.

    Args:
        weights: dense.
        format: or its name, a key of `moetor.core.formats.FORMATS`.
        activation_scales: (E,) float32 for the first and for the second product; for formats whose
            activations are static, where they come from calibration.

    Returns:
        New weights that need no gradient.

    Raises:
        InvalidInput: quantised weights, an unknown format, sizes that it cannot take, or missing
            activation scales.

    >>> dense = ExpertWeights(Weight(torch.ones(2, 64, 32)), Weight(torch.ones(2, 32, 32)))
    >>> fp4 = quantize_experts(dense, "mxfp4")
    >>> fp4.up.data.shape, fp4.up.data.dtype, fp4.up.scale.shape, fp4.hidden_size
    (torch.Size([2, 64, 16]), torch.int8, torch.Size([2, 64, 1]), 32)
    """
    if isinstance(format, str):
        if format not in FORMATS:
            raise InvalidInput(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
        format = FORMATS[format]
    if weights.quantized:
        raise InvalidInput(f"quantising needs dense experts, got {weights.format}; dequantise them first")
    if format.activation_scheme == "static" and activation_scales is None:
        raise InvalidInput(f"quantising to {format.name} needs activation_scales from a calibration, got none")
    first, second = activation_scales or (None, None)
    ups = tuple(_quantized(up, format, first) for up in weights.ups)
    return _with(weights, ups, _quantized(weights.down, format, second))


def dequantize_experts(weights: ExpertWeights, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    """The same layer with dense matrices, whose activations are no longer rounded.

    Args:
        weights: of any format.
        dtype: of the result; dense weights are converted.
    """
    ups = tuple(_dequantized(up, dtype) for up in weights.ups)
    return _with(weights, ups, _dequantized(weights.down, dtype))


def split_gate_up(
    data: Tensor,
    scale: Tensor,
    format: Format | str,
    bias: Tensor | None = None,
    activation_scale: Tensor | None = None,
) -> tuple[Weight, Weight]:
    """Gate and up rows that were quantised apart and then stacked, as a pair; views, no copy.

    For per-tensor scales (E, 2, 1), and for blocks that begin anew with the up rows because I is
    no multiple of their height.

    Args:
        data: (E, 2·I, …), gate rows first.
        scale: (E, 2·n, …), the scales of gate first.
        format: of each of the two.

    >>> from moetor.core.formats import fp8
    >>> gate, up = split_gate_up(torch.zeros(3, 8, 4).to(torch.float8_e4m3fn), torch.ones(3, 2, 1), fp8((0, 0)))
    >>> up.data.shape, up.scale.shape
    (torch.Size([3, 4, 4]), torch.Size([3, 1, 1]))
    """
    name = format if isinstance(format, str) else format.name
    if data.shape[1] % 2 or scale.shape[1] % 2:
        raise InvalidInput(
            "gate and up that were quantised apart have as many rows and scales each,"
            f" got {data.shape[1]} rows and {scale.shape[1]} rows of scales together"
        )
    biases = (None, None) if bias is None else bias.chunk(2, dim=1)
    gate, up = (
        Weight(one, part_bias, part_scale, name, activation_scale=activation_scale)
        for one, part_bias, part_scale in zip(data.chunk(2, dim=1), biases, scale.chunk(2, dim=1), strict=True)
    )
    return gate, up


def weight_of_blocks(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> Weight:
    """MXFP4 as gpt-oss' files have it, as a Weight; a view.

    Args:
        blocks: (E, N, K/32, 16) uint8, sixteen bytes of two numbers a block.
        scales: (E, N, K/32) uint8, the exponents of e8m0.

    >>> blocks = torch.zeros(2, 6, 3, 16, dtype=torch.uint8)
    >>> weight = weight_of_blocks(blocks, torch.full((2, 6, 3), 127, dtype=torch.uint8))
    >>> weight.out_features, weight.in_features
    (6, 96)
    """
    if blocks.dim() != 4 or blocks.shape[3] != 16 or blocks.dtype != torch.uint8:
        raise InvalidInput(f"MXFP4 blocks must be (E, N, K/32, 16) of uint8, got {tuple(blocks.shape)} {blocks.dtype}")
    return Weight(blocks.flatten(2), bias, scales, mxfp4().name)


def _quantized(weight: Weight, format: Format, activation_scale: Tensor | None) -> Weight:
    static = activation_scale if format.activation_scheme == "static" else None
    quantized = (quantize(matrix, format) for matrix in weight.matrices())
    if not weight.stacked:
        payloads, scales = zip(*quantized, strict=True)
        return Weight(list(payloads), weight.bias, list(scales), format.name, activation_scale=static)
    data = scale = None
    for expert, (payload, scale_of_one) in enumerate(quantized):
        if data is None or scale is None:
            data = payload.new_empty((weight.num_experts, *payload.shape))
            scale = scale_of_one.new_empty((weight.num_experts, *scale_of_one.shape))
        data[expert], scale[expert] = payload, scale_of_one
    assert data is not None
    return Weight(data, weight.bias, scale, format.name, activation_scale=static)


def _dequantized(weight: Weight, dtype: torch.dtype) -> Weight:
    format = FORMATS[weight.format]
    if not format.quantized:
        data = [one.to(dtype) for one in weight.data] if isinstance(weight.data, list) else weight.data.to(dtype)
        return replace(weight, data=data)
    matrices = (dequantize(*parts, format, dtype) for parts in zip(weight.matrices(), weight.scales(), strict=True))
    if not weight.stacked:
        return Weight(list(matrices), weight.bias)
    shape = (weight.num_experts, weight.out_features, weight.in_features)
    data = torch.empty(shape, dtype=dtype, device=weight.first.device)
    for expert, matrix in enumerate(matrices):
        data[expert] = matrix
    return Weight(data, weight.bias)


def _with(weights: ExpertWeights, ups: tuple[Weight, ...], down: Weight) -> ExpertWeights:
    return replace(weights, up=(ups[0], ups[1]) if len(ups) == 2 else ups[0], down=down, prepared=None)
