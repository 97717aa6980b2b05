"""DeepGEMM's Mega MoE: the whole layer in one kernel; FP8 weights on SM90, laid out for it once; inference."""

from dataclasses import replace

import torch
from torch import Tensor

from ..core.activation import Activation
from ..core.errors import BackendRefused
from ..core.interface import Backend, Call
from ..core.weights import ExpertWeights, Prepared
from ..kernels.external.packages import described, loaded
from ..kernels.external.requirements import DEEP_GEMM
from . import external
from .deepgemm import float32_scale, format_why_not
from .stacked import NEEDS_A_STACK

NAME = "deepgemm_megamoe"
# The functions that only some releases have, by major compute capability.
_FUNCTIONS = {9: ("fp8_mega_moe", "transform_weights_for_mega_moe_sm90"), 10: ("fp8_fp4_mega_moe",)}
# A warp holds a token's experts, a bit mask of 64 the blocks of the intermediate size.
_MOST_PER_TOKEN, _LARGEST_INTERMEDIATE = 32, 4096
# Scales of one row are copied 16 bytes at a time: four of 128 columns, and four of 64 between the products.
_H_MULTIPLE, _I_MULTIPLE = 512, 256


def machine_why_not(device: torch.device) -> str | None:
    if reason := external.machine_why_not(DEEP_GEMM, device):
        return reason
    if not torch.distributed.is_available():
        return "needs torch.distributed, which this build of torch has not"
    functions = _FUNCTIONS[external.machine_of(device).capability[0]]
    missing = [name for name in functions if not hasattr(loaded(DEEP_GEMM), name)]
    return f"needs a deep_gemm with {' and '.join(missing)}, got {described(DEEP_GEMM)}" if missing else None


# What torch._dynamo.assume_constant_result does, without importing all of torch._dynamo with moetor.
machine_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if reason := external.wrong_device(call):
        return reason
    if call.needs_grad:
        return "has no backward pass; run inside torch.no_grad() or choose grouped_mm"
    if reason := _weights_why_not(weights):
        return reason
    if call.dtype != torch.bfloat16:
        return f"needs bfloat16, got {call.dtype}"
    if call.top_k > _MOST_PER_TOKEN:
        return f"needs at most {_MOST_PER_TOKEN} experts a token, got {call.top_k}"
    if weights.prepared is None or weights.prepared.backend != NAME:
        return f"needs weights laid out for it; ExpertsInterface.prepare(weights, {NAME!r}) makes a copy that is"
    return None


def _weights_why_not(weights: ExpertWeights) -> str | None:
    if not weights.quantized:
        return f"needs FP8 weights in blocks of 128 × 128, got {weights.format}"
    if not weights.stacked:
        return NEEDS_A_STACK
    if reason := format_why_not(weights):
        return reason
    if external.major(weights) >= 10:
        return "is written for FP8 on compute capability 9.0, and not for FP4 on 10.0 yet; choose deepgemm"
    if isinstance(weights.up, tuple) or weights.interleaved:
        return "needs gate and up in one tensor, gate rows first"
    if not weights.gated:
        return "needs experts with a gate, got none"
    if reason := _gate_why_not(weights.activation):
        return reason
    if any(weight.bias is not None for weight in weights.all):
        return "cannot add biases"
    if weights.after_down is not None:
        return "cannot fuse a norm after the second product"
    H, I = weights.hidden_size, weights.intermediate_size
    if H % _H_MULTIPLE or I % _I_MULTIPLE or I > _LARGEST_INTERMEDIATE:
        return (
            f"needs H a multiple of {_H_MULTIPLE} and I of {_I_MULTIPLE}, at most {_LARGEST_INTERMEDIATE},"
            f" got H = {H} and I = {I}"
        )
    return None


def _gate_why_not(activation: Activation) -> str | None:
    """It computes silu(gate) · up, both clamped before if there is a limit."""
    clamped = Activation("silu", limit=activation.limit)
    return None if activation == clamped else f"computes silu with a limit or without, got {activation}"


def prepare(weights: ExpertWeights) -> ExpertWeights:
    """The same layer with a copy of its weights in the kernel's order."""
    from ..kernels.megamoe_experts import prepare_fp8  # loads triton

    if reason := _weights_why_not(weights):
        raise BackendRefused(f"experts backend {NAME!r} cannot prepare these weights: {reason}")
    (up,), down = weights.ups, weights.down
    first, second = prepare_fp8(up.stack_ENK(), float32_scale(up), down.stack_ENK(), float32_scale(down))
    return replace(weights, prepared=Prepared(NAME, first, second))


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from ..kernels.megamoe_experts import megamoe_experts  # loads triton

    assert weights.prepared is not None
    made = weights.prepared
    return megamoe_experts(hidden_states, top_k_index, top_k_weights, made.up, made.down, weights.activation.limit)


def load(device: torch.device) -> None:
    external.load(DEEP_GEMM, device)


BACKEND = Backend(
    NAME, forward, machine_why_not, why_not, prepare, load=load, summary="DeepGEMM's Mega MoE: FP8 in one kernel"
)
