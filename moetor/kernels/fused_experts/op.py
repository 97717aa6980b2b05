"""The layer as a function and as an operator, and the choice between its two ways."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...core.activation import Activation
from ..library import define
from . import table
from .few_tokens import FewTokens, plan_few_tokens
from .many_tokens import ManyTokens, plan_many_tokens
from .operands import Call

# How each call is run is worked out once for its shapes: at one token the kernels take 20 µs, and
# working out their arguments anew would take longer. A layer has one for each number of tokens.
_PLANS: dict[tuple[Any, ...], FewTokens | ManyTokens] = {}
_MOST_PLANS = 4096


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
    # the operator is for tracing: its own way costs 13 µs for so many arguments
    run = torch.ops.moetor.fused_experts if torch.compiler.is_compiling() else _fused_experts
    out: Tensor = run(
        x_TH, ids_TK, routing_TK, up, up_bias, down, down_bias, gated, interleaved,
        a.kind, a.alpha, a.limit, a.limit_after, a.up_offset, a.gate_softcap, a.up_softcap,
    )  # fmt: skip
    return out


def _fused_experts(
    x: Tensor, ids: Tensor, routing: Tensor, up: list[Tensor], up_bias: list[Tensor], down: Tensor,
    down_bias: Tensor | None, gated: bool, interleaved: bool, kind: str, alpha: float, limit: float | None,
    limit_after: bool, up_offset: float, gate_softcap: float | None, up_softcap: float | None,
) -> Tensor:  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    # in the order of gate.apply_gate; one kernel is compiled for each gate
    gate = (kind, gated, alpha, limit, limit_after, up_offset, gate_softcap, up_softcap)
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    call = Call(x, ids.contiguous(), routing.contiguous(), up, up_bias, down, down_bias, gated, interleaved)
    key = (*_signature(call), gate, tf32)
    plan = _PLANS.get(key)
    with _on(x):
        if plan is not None:
            plan.run(call, out)
            return out
        few = x.shape[0] <= table.FEW_TOKENS
        plan = plan_few_tokens(call, gate) if few else plan_many_tokens(call, gate, tf32)
        plan.run(call, out)
    if plan.ready:  # Triton's interpreter compiles nothing
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan  # only now: another thread may look
    return out


def _signature(call: Call) -> tuple[Any, ...]:
    """All that a plan depends on, but the gate."""
    x, ids, routing = call.x, call.ids, call.routing
    weights = [*call.up, *call.up_bias, call.down]
    if call.down_bias is not None:
        weights.append(call.down_bias)
    return (
        x.device.index, x.shape, x.stride(), x.dtype, ids.shape, ids.dtype, routing.dtype, call.interleaved,
        len(call.up), len(call.up_bias), *[(w.dtype, w.shape, w.stride()) for w in weights],
        *[tensor.data_ptr() % 16 for tensor in (x, ids, routing, *weights)],
    )  # fmt: skip


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the tensors' own device."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else nullcontext()


define(
    "fused_experts(Tensor x, Tensor ids, Tensor routing, Tensor[] up, Tensor[] up_bias, Tensor down,"
    " Tensor? down_bias, bool gated, bool interleaved, str kind, float alpha, float? limit, bool limit_after,"
    " float up_offset, float? gate_softcap, float? up_softcap) -> Tensor",
    _fused_experts,
    lambda x, *_: x.new_empty(x.shape),
)
