"""Payload and scales of quantised experts must fit their format: asked once, when a Weight is built.

Letters: E experts; N and K are the output and input size of one matrix.
"""

import torch
from torch import Tensor

from .errors import InvalidInput
from .formats import Format

Stack = Tensor | list[Tensor]


def require_fitting(
    format: Format, data: Stack, scale: Stack | None, activation_scale: Tensor | None, transposed: bool
) -> None:
    """Raise InvalidInput, naming what is needed and what was given, unless the parts fit the format.

    Args:
        data: (E, N, K), or (E, N, K/2) of two numbers a byte; or a list of E matrices.
        scale: (E, *format.scale_shape(N, K)), or a list of E where data is a list.
        activation_scale: (E,) float32 for formats with static activations, else None.
    """
    who = f"expert weights of format {format.name!r}"
    first = data[0]
    if transposed:
        raise InvalidInput(f"{who} are stored (E, out, in), got transposed=True; give a transposed view instead")
    if first.dtype not in format.payload_dtypes:
        needed = " or ".join(map(str, format.payload_dtypes))
        raise InvalidInput(f"{who} need a payload of {needed}, got {first.dtype}")
    rows, columns = first.shape[-2], first.shape[-1] * format.per_element
    if format.bits == 4 and columns % 32:
        raise InvalidInput(f"{who} need an inner size divisible by 32, got {columns}; pad them or use fp8")
    _require_scale(who, format, data, scale, format.scale_shape(rows, columns))
    _require_activation_scale(who, format, data, activation_scale)


def _require_scale(who: str, format: Format, data: Stack, scale: Stack | None, shape: tuple[int, int]) -> None:
    if scale is None:
        raise InvalidInput(f"{who} need scales (E, {shape[0]}, {shape[1]}), got none; a checkpoint has them beside")
    if isinstance(scale, list) != isinstance(data, list):
        raise InvalidInput(f"{who} need scales stored as the payload is: both in one tensor, or both in a list")
    got = [tuple(one.shape) for one in scale] if isinstance(scale, list) else tuple(scale.shape)
    if got != ([shape] * len(data) if isinstance(scale, list) else (len(data), *shape)):
        hint = ""
        if isinstance(got, tuple) and got[:1] == (len(data),) and got[1:] == (2 * shape[0], shape[1]):
            hint = "; scales of gate and up apart belong to a pair (gate, up): moetor.quantization.split_gate_up"
        raise InvalidInput(
            f"{who} with matrices ({data[0].shape[-2]}, {data[0].shape[-1] * format.per_element}) need scales"
            f" (E, {shape[0]}, {shape[1]}) with E = {len(data)}, one a block of {format.block}, got {got}{hint}"
        )
    kinds = {(one.dtype, one.device) for one in (scale if isinstance(scale, list) else [scale])}
    if len(kinds) > 1 or next(iter(kinds))[0] not in format.scale_dtypes or next(iter(kinds))[1] != data[0].device:
        needed = " or ".join(map(str, format.scale_dtypes))
        given = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
        raise InvalidInput(f"{who} need scales of {needed} on {data[0].device}, got {given}")


def _require_activation_scale(who: str, format: Format, data: Stack, scale: Tensor | None) -> None:
    if (format.activation_scheme == "static") != (scale is not None):
        needed = "a static activation scale (E,)" if scale is None else "no activation scale"
        raise InvalidInput(f"{who} need {needed}, got {None if scale is None else tuple(scale.shape)}")
    if scale is not None and (
        scale.shape != (len(data),) or scale.dtype != torch.float32 or scale.device != data[0].device
    ):
        raise InvalidInput(
            f"{who} need static activation scales (E,) = ({len(data)},) of torch.float32 on {data[0].device},"
            f" got {tuple(scale.shape)} of {scale.dtype} on {scale.device}"
        )
