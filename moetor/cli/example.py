"""Small experts layers to ask backends about, and to run: one for every dtype and layout that models come in."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.activation import Activation
from ..core.interface import Call, describe_call
from ..core.weights import ExpertWeights, Weight
from ..quantization import quantize_experts

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# one layout of a layer to another, with the same sizes
Layout = Callable[[ExpertWeights], ExpertWeights]

# T tokens, K experts per token, E experts, H hidden size, I intermediate size
T, K, E, H, I = 8, 2, 4, 128, 64


@dataclass(frozen=True, slots=True)
class Example:
    """The arguments of one `experts_forward`."""

    weights: ExpertWeights
    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor

    @property
    def args(self) -> tuple[ExpertWeights, Tensor, Tensor, Tensor]:
        return self.weights, self.hidden_states, self.top_k_index, self.top_k_weights

    @property
    def call(self) -> Call:
        return describe_call(*self.args)

    def to_float64(self) -> "Example":
        """The same numbers, on the CPU in float64: what results are measured against."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", torch.float64)

        return Example(
            self.weights.map(convert), convert(self.hidden_states), self.top_k_index.cpu(), convert(self.top_k_weights)
        )


def make_example(dtype: torch.dtype, device: torch.device, layout: Layout) -> Example:
    """Dense, gated, concatenated weights, changed by `layout`; the same random numbers on every device."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    weights = ExpertWeights(Weight(random(E, 2 * I, H) / H**0.5), Weight(random(E, H, I) / I**0.5))
    top_k_index = torch.rand(T, E, generator=generator).topk(K).indices.to(device)
    return Example(
        layout(weights),
        random(T, H),
        top_k_index,
        torch.full((T, K), 1 / K, dtype=dtype, device=device),
    )


def _transposed(weights: ExpertWeights) -> ExpertWeights:
    def one(weight: Weight) -> Weight:
        return replace(weight, data=weight.stack_ENK().transpose(1, 2).contiguous(), transposed=True)

    return replace(weights, up=one(weights.ups[0]), down=one(weights.down))


def _with_bias(weights: ExpertWeights) -> ExpertWeights:
    def one(weight: Weight) -> Weight:
        return replace(weight, bias=weight.first.new_ones(weight.num_experts, weight.out_features))

    return replace(weights, up=one(weights.ups[0]), down=one(weights.down))


def _pair(weights: ExpertWeights) -> ExpertWeights:
    gate, up = weights.ups[0].stack_ENK().chunk(2, dim=1)
    return replace(weights, up=(Weight(gate), Weight(up)))


def _ungated(weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, up=Weight(weights.ups[0].stack_ENK().narrow(1, 0, I)), gated=False)


def _list(weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, up=Weight(weights.ups[0].matrices()), down=Weight(weights.down.matrices()))


def _custom_gate(weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, activation=Activation.custom(lambda x: x[..., :I].sigmoid() * x[..., I:]))


def _training(weights: ExpertWeights) -> ExpertWeights:
    return weights.map(lambda tensor: tensor.requires_grad_())


# what it is called in tables, and how the plain layer becomes it
PLAIN, TRAINING = "gate and up rows in one matrix", "training"
LAYOUTS: dict[str, Layout] = {
    PLAIN: lambda weights: weights,
    "gate and up rows interleaved": lambda weights: replace(weights, interleaved=True),
    "gate and up apart": _pair,
    "no gate": _ungated,
    "stored (in, out)": _transposed,
    "biases": _with_bias,
    "gpt-oss gate (clamp, alpha, offset)": lambda weights: replace(
        weights, activation=Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0)
    ),
    "a model's own gate function": _custom_gate,
    "a norm after the second product": lambda weights: replace(weights, after_down=torch.nn.functional.normalize),
    "one tensor an expert": _list,
    TRAINING: _training,
}


def _quantized(format: str) -> Layout:
    def layout(weights: ExpertWeights) -> ExpertWeights:
        static = torch.ones(weights.num_experts, device=weights.device)
        return quantize_experts(weights, format, (static, static))

    return layout


QUANTIZED: dict[str, Layout] = {
    "FP8 in blocks of 128 × 128": _quantized("fp8"),
    "FP8 in blocks, scales e8m0": _quantized("fp8_e8m0"),
    "FP8 per tensor": _quantized("fp8_tensor"),
    "FP8 per tensor, static activations": _quantized("fp8_tensor_static"),
    "FP8 weights only": _quantized("fp8_weights"),
    "MXFP4 weights only": _quantized("mxfp4"),
    "MXFP4 with FP8 activations": _quantized("mxfp4_dynamic"),
}
