"""The layer as a function and as an operator, and the choice between its two ways."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...core.activation import Activation
from ..library import define
from . import table
from .few_tokens import few_tokens
from .many_tokens import many_tokens
from .operands import matrices


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
    ids, routing = ids.contiguous(), routing.contiguous()
    with _on(x):
        if x.shape[0] <= table.FEW_TOKENS:
            few_tokens(x, ids, routing, up, up_bias, down, down_bias, out, interleaved, gate)
        else:
            first = matrices(up, up_bias, gated, interleaved)
            second = matrices([down], [] if down_bias is None else [down_bias], False, False)
            order = "single" if not gated else "interleaved" if interleaved else "apart" if len(up) > 1 else "stacked"
            many_tokens(x, ids, routing, first, second, out, gate, order)
    return out


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
