"""Our own kernels, gather, products, gate and weighted sum fused: Triton on GPUs; fused_cpu on CPUs."""

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ..core.interface import Backend, Call
from ..core.weights import ExpertWeights
from . import fused_cpu
from .stacked import NEEDS_A_STACK

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_EXPERTS = 1024


# Triton's interpreter, for tests, runs its kernels on CPU tensors.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu" and not _INTERPRETED


def machine_why_not(device: torch.device) -> str | None:
    return _machine_why_not(device)


# What torch._dynamo.assume_constant_result does, without importing all of torch._dynamo with moetor.
machine_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _machine_why_not(device: torch.device) -> str | None:
    if _on_cpu(device):
        return None
    if reason := _wrong_device(device):
        return reason
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return f"needs an NVIDIA GPU, got ROCm {torch.version.hip}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs compute capability 8.0 or newer, got {major}.{minor}"


def _wrong_device(device: torch.device) -> str | None:
    return None if device.type in ("cuda", "cpu") else f"needs a CPU or CUDA device, got {device.type}"


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if _on_cpu(call.device):
        return fused_cpu.why_not(weights, call)
    if reason := _wrong_device(call.device):
        return reason
    if weights.quantized:
        return f"needs dense weights, got {weights.format}"
    if not weights.stacked:
        return NEEDS_A_STACK
    if call.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {call.dtype}"
    if weights.dtype != call.dtype:
        return f"needs weights of the dtype that it computes in, {call.dtype}, got {weights.dtype}"
    if weights.activation.fn is not None:
        return "cannot fuse a model's own gate function"
    if weights.after_down is not None:
        return "cannot fuse a norm after the second product"
    if weights.num_experts > _MOST_EXPERTS:
        return f"needs at most {_MOST_EXPERTS} experts, got {weights.num_experts}"
    if isinstance(weights.up, tuple):
        gate, up = weights.up
        if gate.transposed != up.transposed or gate.first.stride() != up.first.stride():
            return "needs gate and up stored alike, got different strides"
        if _layout(gate.bias) != _layout(up.bias):
            return "needs biases of both gate and up, stored alike, or of neither"
    return None


def _layout(bias: Tensor | list[Tensor] | None) -> object:
    return bias.stride() if isinstance(bias, Tensor) else bias is not None


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if _on_cpu(hidden_states.device):
        return fused_cpu.forward(weights, hidden_states, top_k_index, top_k_weights)
    from ..kernels.fused_experts import fused_experts  # loads triton

    biases = [bias for weight in weights.ups if (bias := weight.bias_EN()) is not None]
    return fused_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        [weight.stack_ENK() for weight in weights.ups],
        biases,
        weights.down.stack_ENK(),
        weights.down.bias_EN(),
        weights.activation,
        weights.gated,
        weights.interleaved,
    )


def how(weights: ExpertWeights, call: Call) -> str | None:
    return fused_cpu.how(weights, call) if _on_cpu(call.device) else None


BACKEND = Backend(
    "fused", forward, machine_why_not, why_not, how=how, summary="our kernels: gather, products, gate and sum fused"
)
