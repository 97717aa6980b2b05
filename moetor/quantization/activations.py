"""Activations as the format of the weights asks for them: rounded to e4m3, or left alone."""

import torch
from torch import Tensor

from ..core.formats import ACTIVATION_GROUP, Format, fp8
from .codes import decode, encode
from .matrices import dequantize, quantize

# One scale per row and 128 columns: an activation is a matrix with such blocks.
DYNAMIC = fp8((1, ACTIVATION_GROUP), activations=None)


def round_activations(
    x_SK: Tensor, format: Format, static_scale: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The activations that a product with weights of this format sees, as numbers in `dtype`.

    Dynamic: e4m3 of x / scale, scale = amax / 448 per row and 128 columns, in float32; a group of
    zeros stays zero, and a row's result depends on no other row. Static: e4m3 of x / scale.

    Args:
        x_SK: (S, K), any float dtype.
        static_scale: float32, a scalar or one element; for static formats.
        dtype: float32 or float64.

    >>> from moetor.core.formats import FORMATS
    >>> round_activations(torch.tensor([[448.0, 17.0, 0.1]]), FORMATS["fp8"])
    tensor([[4.4800e+02, 1.6000e+01, 1.0156e-01]])
    """
    if format.activation_scheme is None:
        return x_SK.to(dtype)
    if format.activation_scheme == "dynamic":
        return dequantize(*quantize(x_SK, DYNAMIC), DYNAMIC, dtype)
    assert static_scale is not None, "Weight refuses a static format without its scale"
    return decode(encode(x_SK.float() / static_scale, DYNAMIC), DYNAMIC, dtype) * static_scale.to(dtype)
