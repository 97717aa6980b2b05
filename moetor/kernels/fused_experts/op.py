"""The layer as a function and as an operator, and the choice between its two ways."""

from typing import Any

import torch
from torch import Tensor

from ...core.activation import Activation
from ..library import define
from . import table
from .few_tokens import FewTokens, plan_few_tokens
from .many_tokens import ManyTokens, plan_many_tokens
from .operands import LAYER, call_of, gate_of
from .plans import Plans, on_device_of, signature, uses_tf32
from .training import fused_experts_with_gradient, needs_gradient

_PLANS: Plans[FewTokens | ManyTokens] = Plans()


def fused_experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    routing_TK: Tensor,
    up: list[Tensor],
    up_bias: list[Tensor],
    down: Tensor,
    down_bias: Tensor | None,
    activation: Activation,
    gated: bool,
    interleaved: bool,
) -> Tensor:
    """The layer's result (T, H) in the dtype of x.

    Args:
        x_TH: (T, H) bfloat16, float16 or float32.
        ids_TK, routing_TK: (T, K) ids of experts (others add nothing) and float weights.
        up: (E, 2I, H) in one tensor, gate rows first or interleaved; gate and up (E, I, H) apart,
            of the same strides; or (E, I, H) when not gated. Views of any strides.
        up_bias: (E, N) for each of them, or none.
        down, down_bias: (E, H, I) likewise, and (E, H) or None.
    """
    a = activation
    gate = (gated, interleaved, a.kind, a.alpha, a.limit, a.limit_after, a.up_offset, a.gate_softcap, a.up_softcap)
    if needs_gradient((x_TH, routing_TK, *up, down, *up_bias, down_bias)):
        return fused_experts_with_gradient(x_TH, ids_TK, routing_TK, up, up_bias, down, down_bias, gate)
    # the operator is for tracing: its own way costs 13 µs for so many arguments
    run = torch.ops.moetor.fused_experts if torch.compiler.is_compiling() else _fused_experts
    out: Tensor = run(x_TH, ids_TK, routing_TK, up, up_bias, down, down_bias, *gate)
    return out


def _fused_experts(x: Tensor, ids: Tensor, routing: Tensor, *layer: Any) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    call, gate, tf32 = call_of(x, ids, routing, *layer), gate_of(*layer), uses_tf32(x)
    key = (*signature(call), gate, tf32)
    plan = _PLANS.find(key)
    with on_device_of(x):
        if plan is not None:
            plan.run(call, out)
            return out
        few = x.shape[0] <= table.FEW_TOKENS
        plan = plan_few_tokens(call, gate) if few else plan_many_tokens(call, gate, tf32)
        plan.run(call, out)
    _PLANS.keep(key, plan)
    return out


define(
    f"fused_experts(Tensor x, Tensor ids, Tensor routing, {LAYER}) -> Tensor",
    _fused_experts,
    lambda x, *_: x.new_empty(x.shape),
)
