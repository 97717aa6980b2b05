"""`fused` on CPU tensors: sorted pairs, and per expert the product that is the fastest here.

Dense: oneDNN's or PyTorch's. Quantised: compiled code that reads the packed bytes, for inference.
"""

from torch import Tensor

from ..core.interface import Call
from ..core.weights import ExpertWeights, Weight
from ..kernels.fused_experts_cpu import describe, fused_experts
from ..quantization.layer_cpu import describe as describe_quantized
from ..quantization.layer_cpu import quantized_layer


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if weights.quantized and call.needs_grad:
        return f"has no backward pass for {weights.format}; run inside torch.no_grad() or choose grouped_mm"
    if weights.activation.fn is not None:
        return "cannot fuse a model's own gate function"
    if weights.after_down is not None:
        return "cannot fuse a norm after the second product"
    return None


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if weights.quantized:
        return quantized_layer(weights, hidden_states, top_k_index, top_k_weights)
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
    if weights.quantized:
        return describe_quantized()
    used = dict.fromkeys(
        describe(weight.stack_ENK() if weight.stacked else weight.matrices(), call.dtype) for weight in weights.all
    )
    return f"products by {', '.join(used)}"


def _tensors(weight: Weight) -> list[Tensor]:
    """The stack, or each expert's matrix."""
    return [weight.stack_ENK()] if weight.stacked else weight.matrices()
