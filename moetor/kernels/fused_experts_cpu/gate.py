"""What happens between the two products, and its derivative, on the rows of a few experts."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.activation import Activation

_SQRT_HALF, _INV_SQRT_2PI = 0.5**0.5, (2 * torch.pi) ** -0.5


def split(products: Sequence[Tensor], gated: bool, interleaved: bool) -> tuple[Tensor, Tensor | None]:
    """Gate and up (…, I), views of the first product or products; a lone one is no gate's."""
    if len(products) == 2:
        return products[0], products[1]
    (product,) = products
    if not gated:
        return product, None
    if interleaved:
        return product[..., 0::2], product[..., 1::2]
    gate, up = product.chunk(2, dim=-1)
    return gate, up


def gate_gradient(
    activation: Activation, gate: Tensor, up: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate and up from that of `activation.apply(gate, up)`; all in fp32 or float64.

    At the very limit of a clamp the gradient passes, as torch.clamp has it.
    """
    a = activation
    linear = gate if a.limit is None or a.limit_after else gate.clamp(max=a.limit)
    value, slope = _value_and_slope(a, linear)
    if a.limit is not None:
        slope = slope.masked_fill((value if a.limit_after else gate) > a.limit, 0)
        value = value.clamp(max=a.limit) if a.limit_after else value
    if up is None:
        return grad * slope, None
    factor = up if a.limit is None else up.clamp(-a.limit, a.limit)
    grad_up = grad * value
    if a.up_softcap is not None:
        bent = torch.tanh(factor / a.up_softcap)
        factor, grad_up = a.up_softcap * bent, grad_up * (1 - bent * bent)
    if a.limit is not None:
        grad_up = grad_up.masked_fill(up.abs() > a.limit, 0)
    return grad * (factor + a.up_offset) * slope, grad_up


def _value_and_slope(a: Activation, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and f'(x)."""
    if a.kind == "silu":
        sigmoid = torch.sigmoid(a.alpha * x)
        if a.gate_softcap is None:
            value = x * sigmoid
            return value, sigmoid + a.alpha * value * (1 - sigmoid)
        bent = torch.tanh(x / a.gate_softcap)
        value = a.gate_softcap * bent * sigmoid
        return value, (1 - bent * bent) * sigmoid + a.alpha * value * (1 - sigmoid)
    if a.kind == "gelu":
        below = 0.5 * (1 + torch.erf(x * _SQRT_HALF))
        return x * below, below + x * _INV_SQRT_2PI * torch.exp(-0.5 * x * x)
    if a.kind == "gelu_tanh":
        scale, cubic = (2 / torch.pi) ** 0.5, 0.044715
        bent = torch.tanh(scale * (x + cubic * x * x * x))
        slope = 0.5 * (1 + bent) + 0.5 * x * (1 - bent * bent) * scale * (1 + 3 * cubic * x * x)
        return 0.5 * x * (1 + bent), slope
    if a.kind == "relu":
        return F.relu(x), (x > 0).to(x.dtype)
    if a.kind == "relu2":
        positive = F.relu(x)
        return positive * positive, 2 * positive
    if a.kind == "sigmoid":
        value = torch.sigmoid(x)
        return value, value * (1 - value)
    assert a.kind == "identity", "custom gates are refused in why_not"
    return x, torch.ones_like(x)
