"""What a call must give: a plain loop in float64 on the same rounded inputs, gradients by autograd.

Nothing of what it checks is used here, gates included.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.activation import Activation
from ..core.weights import ExpertWeights, Weight
from .cases import Inputs, trainable
from .oracle_formats import decoded, rounded


def oracle(inputs: Inputs, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The result (T, H) and the gradient of each leaf that needs one, in float64.

    A clamp's derivative jumps, and the stored first product is rounded: a gate on one side of the
    clamp in float64 and on the other in bfloat16 is no fault. So where there is a clamp, its side
    is taken from the rounded product; values are not touched.

    Args:
        upstream: (T, H), the gradient of the result.
    """
    weights = dense(inputs.weights).map(_wide)
    x = _wide(inputs.hidden_states)
    routing = _wide(inputs.top_k_weights)
    result = _forward(weights, inputs, x, routing)
    twins = {"hidden_states": x, "top_k_weights": routing} | trainable(weights, inputs.weights.quantized)
    wanted = {name: twin for name, twin in twins.items() if inputs.leaves()[name].requires_grad}
    if not wanted:
        return result.detach(), {}
    gradients = torch.autograd.grad(result, list(wanted.values()), upstream.double(), materialize_grads=True)
    return result.detach(), dict(zip(wanted, gradients, strict=True))


def relative_error(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """‖value − reference‖ / max(‖reference‖, floor); 0 where both are zero, inf for NaN or another shape."""
    if value.shape != reference.shape:
        return float("inf")
    difference = (value.double() - reference.double()).norm().item()
    if difference != difference:
        return float("inf")
    scale = max(reference.double().norm().item(), floor)
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def dense(weights: ExpertWeights) -> ExpertWeights:
    """The layer with what its bytes mean in their place."""
    if not weights.quantized:
        return weights
    ups = tuple(decoded(up) for up in weights.ups)
    return replace(weights, up=(ups[0], ups[1]) if len(ups) == 2 else ups[0], down=decoded(weights.down))


def _forward(weights: ExpertWeights, inputs: Inputs, x: Tensor, routing: Tensor) -> Tensor:
    stored, ids = inputs.weights, inputs.top_k_index
    # quantised experts are to be computed in float32 from one rounding of their format to the next
    dtype = torch.promote_types(inputs.case.dtype, torch.float32) if stored.quantized else inputs.case.dtype
    # Zero times every tensor keeps the graph connected where no pair has an expert; the values
    # that take part are those of finite tensors, as no oracle is asked about others.
    total = x * 0 + routing.sum() * 0 + sum(tensor.sum() for tensor in weights.tensors()) * 0
    for expert in range(weights.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        pairs = zip(weights.ups, stored.ups, strict=True)
        products = [_linear(up, expert, rounded(x[token], as_stored, expert)) for up, as_stored in pairs]
        inner = _gate(weights, torch.cat(products, dim=-1), dtype)
        rows = _linear(weights.down, expert, rounded(inner, stored.down, expert))
        if weights.after_down is not None:
            rows = weights.after_down(rows)
        total = total.index_add(0, token, rows * routing[token, slot, None])
    return total


def _linear(weight: Weight, expert: int, rows: Tensor) -> Tensor:
    matrix = weight.data[expert]
    out = rows @ (matrix if weight.transposed else matrix.T)
    return out if weight.bias is None else out + weight.bias[expert]


def _clamp(value: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    rounded = value.detach().to(dtype).double()
    inside = (rounded >= low) & (rounded <= high)
    return torch.where(inside, value, value.detach().clamp(low, high))


def _gate(weights: ExpertWeights, product: Tensor, dtype: torch.dtype) -> Tensor:
    activation = weights.activation
    if activation.fn is not None:
        return activation.fn(product)
    if not weights.gated:
        before, after = (None, activation.limit) if activation.limit_after else (activation.limit, None)
        gate = product if before is None else _clamp(product, -torch.inf, before, dtype)
        value = _function(activation, gate)
        return value if after is None else _clamp(value, -torch.inf, after, torch.float32)
    half = product.shape[-1] // 2
    gate, up = (product[:, ::2], product[:, 1::2]) if weights.interleaved else (product[:, :half], product[:, half:])
    limit = activation.limit
    if limit is not None:
        up = _clamp(up, -limit, limit, dtype)
        gate = gate if activation.limit_after else _clamp(gate, -torch.inf, limit, dtype)
    if activation.up_softcap is not None:
        up = activation.up_softcap * (up / activation.up_softcap).tanh()
    value = _function(activation, gate)
    if limit is not None and activation.limit_after:
        value = _clamp(value, -torch.inf, limit, torch.float32)
    return value * (up + activation.up_offset)


def _function(activation: Activation, gate: Tensor) -> Tensor:
    linear = gate
    if activation.gate_softcap is not None:
        linear = activation.gate_softcap * (gate / activation.gate_softcap).tanh()
    match activation.kind:
        case "silu":
            return linear / (1 + (-activation.alpha * gate).exp())
        case "gelu":
            return gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
        case "gelu_tanh":
            return gate * 0.5 * (1 + (0.7978845608028654 * (gate + 0.044715 * gate**3)).tanh())
        case "relu":
            return F.relu(gate)
        case "relu2":
            return F.relu(gate) ** 2
        case "sigmoid":
            return 1 / (1 + (-gate).exp())
        case "identity":
            return gate
    raise AssertionError(f"the oracle does not know the gate {activation.kind!r}")
