"""DeepGEMM's grouped products in bfloat16 and FP8, SM90, with kernels of ours around them; inference."""

from dataclasses import replace

import torch
from torch import Tensor

from ..core.errors import BackendRefused
from ..core.formats import FORMATS
from ..core.interface import Backend, Call
from ..core.weights import ExpertWeights, Prepared, Weight
from ..kernels.external.requirements import DEEP_GEMM
from ..quantization.codes import decode_scale
from . import external
from .stacked import NEEDS_A_STACK

NAME = "deepgemm"
# Rows and columns of one scale, and columns of one scale of activations.
GROUP = 128
_MOST_EXPERTS = 1024


def machine_why_not(device: torch.device) -> str | None:
    return external.machine_why_not(DEEP_GEMM, device)


# What torch._dynamo.assume_constant_result does, without importing all of torch._dynamo with moetor.
machine_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not(weights: ExpertWeights, call: Call) -> str | None:
    if reason := external.wrong_device(call):
        return reason
    if call.needs_grad:
        return "has no backward pass; run inside torch.no_grad() or choose grouped_mm"
    if not weights.stacked:
        return NEEDS_A_STACK
    if weights.quantized:
        if reason := format_why_not(weights):
            return reason
        if FORMATS[weights.format].scale == "e8m0" and not _prepared(weights):
            order = "in int32, four exponents each" if external.major(weights) >= 10 else "in float32"
            return f"reads such scales {order}; ExpertsInterface.prepare(weights, {NAME!r}) has them beside, exactly"
    if call.dtype != torch.bfloat16:
        return f"needs bfloat16, got {call.dtype}"
    if not weights.quantized and weights.dtype != call.dtype:
        return f"needs weights of the dtype that it computes in, {call.dtype}, got {weights.dtype}"
    if isinstance(weights.up, tuple):
        return "needs gate and up in one tensor, got two"
    if weights.activation.fn is not None:
        return "cannot fuse a model's own gate function"
    if weights.after_down is not None:
        return "cannot fuse a norm after the second product"
    if weights.num_experts > _MOST_EXPERTS:
        return f"needs at most {_MOST_EXPERTS} experts, got {weights.num_experts}"
    return next((reason for weight in weights.all if (reason := _layout_why_not(weight, call))), None)


def format_why_not(weights: ExpertWeights) -> str | None:
    """What its products cannot make of a quantised format, for both backends of this library."""
    format, newer = FORMATS[weights.format], external.major(weights) >= 10
    if format.activation_scheme == "static":
        return f"rounds activations by scales of its own and cannot use static ones, got {format.name}"
    if newer and format.scale != "e8m0":
        return (
            f"needs scales of powers of two on compute capability 10.0, got {format.name}; quantise with"
            ' scale_fmt="ue8m0", or choose grouped_mm or batched_mm'
        )
    if format.activation_scheme is None:
        return f"rounds activations to FP8, which weights of {format.name} do not ask for"
    if format.bits == 4:
        return None if newer else f"multiplies FP4 weights on compute capability 10.0 only, got {format.name}"
    return None if format.block == (GROUP, GROUP) else f"needs one scale a block of 128 × 128, got {format.name}"


def _layout_why_not(weight: Weight, call: Call) -> str | None:
    stack = weight.stack_ENK()
    (_, N, width), size = stack.shape, stack.element_size()
    multiple = 128 if size == 1 else 64
    if N % multiple or weight.in_features % multiple:
        size_of_one = f"{N} × {weight.in_features}"
        return f"needs {stack.dtype} matrices of multiples of {multiple} rows and columns, got {size_of_one}"
    strides = stack.stride()
    if strides != (N * width, width, 1) and (size == 1 or strides != (N * width, 1, N)):
        return "needs the experts' matrices one after another without gaps, got other strides"
    # while compiling there are no addresses; the library's own check is left
    if not call.compiling and stack.data_ptr() % 16:
        return "needs matrices that begin at a multiple of 16 bytes, got others"
    return None


def _prepared(weights: ExpertWeights) -> bool:
    return weights.prepared is not None and weights.prepared.backend == NAME


def prepare(weights: ExpertWeights) -> ExpertWeights:
    """The same layer with scales of powers of two as the products read them; others are read as they are."""
    if reason := format_why_not(weights):
        raise BackendRefused(f"experts backend {NAME!r} cannot prepare these weights: {reason}")
    if FORMATS[weights.format].scale == "float32":
        return weights
    if isinstance(weights.up, tuple):
        raise BackendRefused(f"experts backend {NAME!r} cannot prepare a pair of gate and up; it needs one tensor")
    up, down = (_scale(weight, external.major(weights)) for weight in weights.all)
    return replace(weights, prepared=Prepared(NAME, (up,), (down,)))


def _scale(weight: Weight, major: int) -> Tensor:
    scale, format = float32_scale(weight), FORMATS[weight.format]
    if major < 10:
        return scale
    from ..kernels.deepgemm_experts import prepare_powers  # loads triton

    assert format.block is not None
    return prepare_powers(scale, weight.out_features, weight.in_features, format.block)


def float32_scale(weight: Weight) -> Tensor:
    """A stack's scales in float32; powers of two are exact."""
    assert isinstance(weight.scale, Tensor), "asked of quantised stacks"
    return decode_scale(weight.scale, FORMATS[weight.format])


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from ..kernels.deepgemm_experts import deepgemm_experts  # loads triton

    (up,), down = weights.ups, weights.down
    prepared = weights.prepared if _prepared(weights) else None
    up_scale, down_scale = (prepared.up[0], prepared.down[0]) if prepared else (up.scale, down.scale)
    assert not isinstance(up_scale, list)
    assert not isinstance(down_scale, list)
    return deepgemm_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        up.stack_ENK(),
        up_scale,
        up.bias_EN(),
        down.stack_ENK(),
        down_scale,
        down.bias_EN(),
        weights.activation,
        weights.gated,
        weights.interleaved,
    )


def load(device: torch.device) -> None:
    external.load(DEEP_GEMM, device)


BACKEND = Backend(
    NAME,
    forward,
    machine_why_not,
    why_not,
    prepare,
    load=load,
    summary="DeepGEMM's grouped products, ours around them: bf16, FP8",
)
