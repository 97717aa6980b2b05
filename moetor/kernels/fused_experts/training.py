"""The layer with gradients: an autograd.Function, around operators where torch.compile traces it.

The first product is kept, by pairs, in the dtype of x; the gate, and the rows between the products,
are computed anew.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..library import define
from .backward import Backward, Wanted, plan_backward
from .many_tokens import ManyTokens, plan_many_tokens
from .operands import LAYER, call_of, gate_of
from .plans import Plans, on_device_of, signature, uses_tf32

_FORWARD: Plans[ManyTokens] = Plans()
_BACKWARD: Plans[Backward] = Plans()


def needs_gradient(tensors: Sequence[Tensor | None]) -> bool:
    # forward-mode derivatives come without requires_grad; the function below refuses them
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def fused_experts_with_gradient(
    x: Tensor, ids: Tensor, routing: Tensor, up: list[Tensor], up_bias: list[Tensor], down: Tensor,
    down_bias: Tensor | None, gate: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    """As `op.fused_experts`, with the numbers of its gate in the operators' order."""
    out: Tensor = _FusedExperts.apply((len(up), gate), ids, x, routing, *up, down, *up_bias, down_bias)
    return out


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, ids, x, routing, *weights):
        run = torch.ops.moetor.fused_experts_training if torch.compiler.is_compiling() else _forward
        out, *kept = run(x, ids, routing, *_parts(spec, weights), *spec[1])
        ctx.spec, ctx.num_kept = spec, len(kept)
        ctx.save_for_backward(ids, *kept, x, routing, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ids, *rest = ctx.saved_tensors
        kept, (x, routing, *weights) = rest[: ctx.num_kept], rest[ctx.num_kept :]
        needs = list(ctx.needs_input_grad[2:])
        run = torch.ops.moetor.fused_experts_backward if torch.compiler.is_compiling() else _backward
        found = iter(run(grad, x, ids, routing, kept, *_parts(ctx.spec, weights), *ctx.spec[1], needs))
        return None, None, *[next(found) if need else None for need in needs]


def _parts(spec: Any, weights: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
    """up, up_bias, down, down_bias."""
    num_up = spec[0]
    return list(weights[:num_up]), list(weights[num_up + 1 : -1]), weights[num_up], weights[-1]


def _forward(x: Tensor, ids: Tensor, routing: Tensor, *layer: Any) -> list[Tensor]:
    call, gate = call_of(x, ids, routing, *layer), gate_of(*layer)
    S = ids.numel()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = [x.new_empty(S, up.shape[1]) for up in call.up]
    if not S:
        return [out, *kept]
    key = (*signature(call), gate, uses_tf32(x))
    with on_device_of(x):
        plan = _FORWARD.find(key)
        if plan is not None:
            plan.run(call, out, kept)
        else:
            plan = plan_many_tokens(call, gate, uses_tf32(x))
            plan.run(call, out, kept)
            _FORWARD.keep(key, plan)
    return [out, *kept]


def _fake_forward(x: Tensor, ids: Tensor, routing: Tensor, up: list[Tensor], *_: Any) -> list[Tensor]:
    S = ids.shape[0] * ids.shape[1]
    return [x.new_empty(x.shape), *(x.new_empty(S, stored.shape[1]) for stored in up)]


def _backward(grad: Tensor, x: Tensor, ids: Tensor, routing: Tensor, kept: list[Tensor], *rest: Any) -> list[Tensor]:
    *layer, needs = rest
    call, gate = call_of(x, ids, routing, *layer), gate_of(*layer)
    tensors = _differentiable(x, routing, *layer)
    if not ids.numel():
        return [torch.zeros_like(tensor) for tensor, need in zip(tensors, needs, strict=True) if need]
    to = [_empty_gradient(tensor) if need else None for tensor, need in zip(tensors, needs, strict=True)]
    key = (*signature(call), gate, uses_tf32(x), *needs)
    grad = grad.contiguous()
    with on_device_of(x):
        plan = _BACKWARD.find(key)
        if plan is not None:
            plan.run(call, grad, kept, to)
        else:
            num_up = len(call.up)
            wanted = Wanted(
                x=needs[0],
                routing=needs[1],
                up=tuple(needs[2 : 2 + num_up]),
                down=needs[2 + num_up],
                up_bias=tuple(needs[3 + num_up : -1]),
                down_bias=needs[-1],
            )
            plan = plan_backward(call, gate, uses_tf32(x), wanted, to)
            plan.run(call, grad, kept, to)
            _BACKWARD.keep(key, plan)
    return [gradient for gradient in to if gradient is not None]


def _fake_backward(
    grad: Tensor, x: Tensor, ids: Tensor, routing: Tensor, kept: list[Tensor], *rest: Any
) -> list[Tensor]:
    *layer, needs = rest
    return [_empty_gradient(t) for t, need in zip(_differentiable(x, routing, *layer), needs, strict=True) if need]


def _differentiable(x: Tensor, routing: Tensor, *layer: Any) -> list[Any]:
    up, up_bias, down, down_bias = layer[:4]
    return [x, routing, *up, down, *up_bias, down_bias]


def _empty_gradient(tensor: Tensor) -> Tensor:
    """Weights' gradients lie as the weights do; what is per token is contiguous."""
    return torch.empty_like(tensor) if tensor.dim() == 3 else tensor.new_empty(tensor.shape)


define(f"fused_experts_training(Tensor x, Tensor ids, Tensor routing, {LAYER}) -> Tensor[]", _forward, _fake_forward)
define(
    f"fused_experts_backward(Tensor grad, Tensor x, Tensor ids, Tensor routing, Tensor[] kept, {LAYER},"
    " bool[] needs) -> Tensor[]",
    _backward,
    _fake_backward,
)
