"""`fused` on CPU tensors: sorted pairs, and per expert oneDNN's products where they are the faster ones."""

from torch import Tensor

from ..core.interface import Call
from ..core.weights import ExpertWeights, Weight
from ..kernels.fused_experts_cpu import describe, fused_experts


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if weights.quantized:
        return f"needs dense weights, got {weights.format}"
    if weights.activation.fn is not None:
        return "cannot fuse a model's own gate function"
    if weights.after_down is not None:
        return "cannot fuse a norm after the second product"
    return None


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return fused_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        [tensor for weight in weights.ups for tensor in _tensors(weight)],
        [weight.bias_EN() for weight in weights.ups],
        _tensors(weights.down),
        weights.down.bias_EN(),
        weights.activation,
        weights.gated,
        weights.interleaved,
    )


def how(weights: ExpertWeights, call: Call) -> str:
    """Whose products these weights get."""
    used = dict.fromkeys(
        describe(weight.stack_ENK() if weight.stacked else weight.matrices(), call.dtype) for weight in weights.all
    )
    return f"products by {', '.join(used)}"


def _tensors(weight: Weight) -> list[Tensor]:
    """The stack, or each expert's matrix."""
    return [weight.stack_ENK()] if weight.stacked else weight.matrices()
