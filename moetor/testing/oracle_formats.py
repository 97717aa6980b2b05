"""What the bytes of a format mean and how it rounds activations, in float64, for the oracle.

Arithmetic by the definitions of e4m3, e2m1 and e8m0, and nothing of `moetor.quantization`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..core.formats import FORMATS
from ..core.weights import Weight


def _e4m3_sizes() -> list[float]:
    """The 127 finite sizes, in the order of their codes: 3 bits of mantissa, 4 of exponent with bias 7."""
    return [c / 8 * 2.0**-6 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]


_E2M1_SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decoded(weight: Weight) -> Weight:
    """The Weight with its matrices in float64; scales are gone, the format stays to be asked for its activations."""
    format = FORMATS[weight.format]
    assert weight.scale is not None
    assert format.block is not None
    matrices = []
    for payload, scale in zip(weight.data, weight.scale, strict=True):
        values = _e4m3(payload) if format.bits == 8 else _e2m1(payload)
        rows, columns = values.shape
        high, wide = format.block[0] or rows, format.block[1] or columns
        numbers = _power_of_two(scale) if format.scale == "e8m0" else scale.double()
        matrices.append(values * numbers[torch.arange(rows) // high][:, torch.arange(columns) // wide])
    return replace(weight, data=torch.stack(matrices), scale=None, format="dense", activation_scale=None)


def rounded(x_SK: Tensor, weight: Weight, expert: int) -> Tensor:
    """Activations as a product with this expert sees them; their gradient passes as if nothing was rounded."""
    scheme = FORMATS[weight.format].activation_scheme
    if scheme is None:
        return x_SK
    x = x_SK.detach().float()
    if scheme == "static":
        assert weight.activation_scale is not None
        scale = weight.activation_scale[expert].expand_as(x)
    else:
        groups = [group.abs().amax(1, keepdim=True).expand_as(group) for group in x.split(128, dim=1)]
        scale = torch.cat(groups, dim=1) / 448
    safe = torch.where(scale > 0, scale, 1.0)
    value = _nearest_e4m3((x / safe).double()) * safe.double()
    return x_SK + (value - x_SK).detach()


def _e4m3(payload: Tensor) -> Tensor:
    code = payload.view(torch.uint8).long()
    sizes = torch.tensor([*_e4m3_sizes(), float("nan")], dtype=torch.float64, device=payload.device)
    return sizes[code & 127] * (1 - 2 * (code >> 7))


def _e2m1(payload: Tensor) -> Tensor:
    byte = payload.view(torch.uint8).long()
    values = torch.tensor([*_E2M1_SIZES, *(-size for size in _E2M1_SIZES)], dtype=torch.float64, device=payload.device)
    out = values.new_empty(byte.shape[0], 2 * byte.shape[1])
    out[:, 0::2], out[:, 1::2] = values[byte % 16], values[byte // 16]
    return out


def _power_of_two(scale: Tensor) -> Tensor:
    return 2.0 ** (scale.view(torch.uint8).double() - 127)


def _nearest_e4m3(value: Tensor) -> Tensor:
    sizes = torch.tensor(_e4m3_sizes(), dtype=torch.float64, device=value.device)
    size = value.abs().clamp(max=448)
    above = torch.searchsorted(sizes, size)
    below = (above - 1).clamp(min=0)
    middle = (sizes[above] + sizes[below]) / 2
    # of two that are equally near, the one with the even code
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return torch.where(up, sizes[above], sizes[below]) * value.sign()
