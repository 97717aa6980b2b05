"""SonicMoE's kernels for gated experts in bfloat16, SM90 and SM100, forward and backward."""

import torch
from torch import Tensor

from ..core.activation import Activation
from ..core.interface import Backend, Call
from ..core.weights import ExpertWeights
from ..kernels.external.packages import described, is_loaded
from ..kernels.external.requirements import SONIC_MOE
from ..kernels.sonicmoe_experts import GATES, compiles, sonicmoe_experts
from . import external
from .stacked import NEEDS_A_STACK


def machine_why_not(device: torch.device) -> str | None:
    return external.machine_why_not(SONIC_MOE, device)


# What torch._dynamo.assume_constant_result does, without importing all of torch._dynamo with moetor.
machine_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if reason := external.wrong_device(call):
        return reason
    if weights.quantized:
        return f"needs dense weights, got {weights.format}"
    if not weights.stacked:
        return NEEDS_A_STACK
    if call.dtype != torch.bfloat16:
        # rows are stored before their weight: in float16 a large one would be inf
        return f"needs bfloat16, got {call.dtype}"
    if weights.dtype != call.dtype:
        return f"needs weights of the dtype that it computes in, {call.dtype}, got {weights.dtype}"
    if not weights.gated:
        return "needs experts with a gate, got none"
    if reason := _gate_why_not(weights.activation):
        return reason
    if weights.after_down is not None:
        return "cannot fuse a norm after the second product"
    return _layout_why_not(weights, call)


def _gate_why_not(activation: Activation) -> str | None:
    known = "silu, gelu_tanh and relu gates without options"
    if activation.kind == "gelu":
        return f"computes {known}; gelu is the erf form, and the library's the tanh form"
    options = {name: getattr(activation, name) for name in ("limit", "gate_softcap", "up_softcap")}
    options |= {"alpha": activation.alpha if activation.alpha != 1 else None, "up_offset": activation.up_offset or None}
    named = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    if activation.kind not in GATES or named:
        gate = "a model's own gate function" if activation.fn is not None else activation.kind
        return f"computes {known}, got {gate}{' with ' + named if named else ''}"
    if activation.kind == "relu" and is_loaded(SONIC_MOE) and not compiles("relu"):
        return f"has no relu gate in the build that is loaded, {described(SONIC_MOE)}"
    return None


def _layout_why_not(weights: ExpertWeights, call: Call) -> str | None:
    if isinstance(weights.up, tuple):
        return "needs gate and up in one tensor, got two"
    if (weights.up.bias is None) != (weights.down.bias is None):
        return "needs biases of both products or of neither, got one"
    for weight in weights.all:
        stack = weight.stack_ENK()
        if not stack.is_contiguous():
            return "needs the experts' matrices one after another in rows, got other strides"
        if stack.shape[1] % 8 or stack.shape[2] % 8:
            return f"needs matrices of multiples of 8 rows and columns, got {stack.shape[1]} × {stack.shape[2]}"
        # while compiling there are no addresses; the library's own check is left
        if not call.compiling and stack.data_ptr() % 16:
            return "needs matrices that begin at a multiple of 16 bytes, got others"
    return None


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    (up,), down = weights.ups, weights.down
    return sonicmoe_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        up.stack_ENK(),
        up.bias_EN(),
        down.stack_ENK(),
        down.bias_EN(),
        weights.activation.kind,
        weights.interleaved,
    )


def load(device: torch.device) -> None:
    external.load(SONIC_MOE, device)


BACKEND = Backend(
    "sonicmoe",
    forward,
    machine_why_not,
    why_not,
    load=load,
    summary="SonicMoE's kernels: gated bf16 experts, with gradients",
)
