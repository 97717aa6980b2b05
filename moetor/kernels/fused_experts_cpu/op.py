"""The layer as operators, and as a function with gradients.

Two operators, forward and backward, and around them an autograd.Function that torch.compile traces.
Inference in eager mode calls the code directly: an operator of so many arguments costs 13 µs a call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ...core.activation import Activation
from ...core.autocast import without_autocast
from ..library import define, needs_operator
from .gradient import Gradients, MatrixGradients, backward
from .layer import forward
from .operands import Layer, chunks, matrices, stacked


def fused_experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    routing_TK: Tensor,
    up: list[Tensor],
    up_bias: list[Tensor | None],
    down: list[Tensor],
    down_bias: Tensor | None,
    activation: Activation,
    gated: bool,
    interleaved: bool,
) -> Tensor:
    """The layer's result (T, H) in the dtype of x.

    Args:
        x_TH: (T, H), any float dtype; weights of another follow it, one matrix at a time.
        ids_TK, routing_TK: (T, K) ids of experts (others add nothing) and float weights.
        up: one stack (E, N, H), or E matrices (N, H); two stacks or 2·E matrices where gate and up
            are apart. Views of any strides.
        up_bias: (E, N) or None, for each stack.
        down, down_bias: likewise, (E, H, I) and (E, H).
    """
    a = activation
    gate = (gated, interleaved, a.kind, a.alpha, a.limit, a.limit_after, a.up_offset, a.gate_softcap, a.up_softcap)
    tensors = (x_TH, routing_TK, *up, *down, *up_bias, down_bias)
    if _needs_gradient(tensors):
        out: Tensor = _FusedExperts.apply((len(up), len(down), gate), ids_TK, *tensors)
        return out
    run = torch.ops.moetor.fused_experts_cpu if needs_operator(x_TH) else _forward
    return run(x_TH, ids_TK, routing_TK, up, up_bias, down, down_bias, *gate, False)[0]


def _needs_gradient(tensors: Sequence[Tensor | None]) -> bool:
    # forward-mode derivatives come without requires_grad; the function below refuses them
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, ids, x, routing, *weights):  # type: ignore[no-untyped-def]
        up, up_bias, down, down_bias = _parts(spec, weights)
        run = torch.ops.moetor.fused_experts_cpu
        out, *kept = run(x, ids, routing, up, up_bias, down, down_bias, *spec[2], True)
        ctx.spec, ctx.num_kept = spec, len(kept)
        ctx.save_for_backward(ids, *kept, x, routing, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ids, *rest = ctx.saved_tensors
        kept, (x, routing, *weights) = rest[: ctx.num_kept], rest[ctx.num_kept :]
        needs = list(ctx.needs_input_grad[2:])
        parts = _parts(ctx.spec, weights)
        run = torch.ops.moetor.fused_experts_cpu_backward
        found = iter(run(grad, x, ids, routing, kept, *parts, *ctx.spec[2], needs))
        return None, None, *[next(found) if need else None for need in needs]


def _parts(spec: Any, weights: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    num_up, num_down, _ = spec
    *up_bias, down_bias = weights[num_up + num_down :]
    return list(weights[:num_up]), up_bias, list(weights[num_up : num_up + num_down]), down_bias


def _forward(x: Tensor, ids: Tensor, routing: Tensor, *rest: Any) -> list[Tensor]:
    *layer, keep = rest
    with without_autocast("cpu"):
        return forward(x, ids, routing, Layer.of(*layer), keep)


def _fake_forward(x: Tensor, ids: Tensor, routing: Tensor, up: list[Tensor], up_bias: list[Any], *rest: Any) -> Any:
    sizes = [product[0].shape[0] for product in matrices(up, len(up_bias))] if rest[-1] else []
    return [x.new_empty(x.shape), *(x.new_empty(ids.shape[0] * ids.shape[1], N) for N in sizes)]


def _backward(grad: Tensor, x: Tensor, ids: Tensor, routing: Tensor, kept: list[Tensor], *rest: Any) -> list[Tensor]:
    *layer, needs = rest
    up, up_bias, down = layer[:3]
    of_weights = [torch.empty_like(t) if need else None for t, need in zip(_weights(layer), needs[2:], strict=True)]
    of_up, of_up_bias, of_down, of_down_bias = _parts((len(up), len(down), None), of_weights)
    S = ids.numel()
    to = Gradients(
        x_SH=x.new_empty(S, x.shape[1]) if needs[0] else None,
        routing_S=routing.new_zeros(S, dtype=torch.promote_types(x.dtype, torch.float32)) if needs[1] else None,
        ups=_gradients(up, of_up, len(up_bias)),
        up_biases=of_up_bias,
        down=_gradients(down, of_down, 1)[0],
        down_bias=of_down_bias,
    )
    with without_autocast("cpu"):
        of_x, of_routing = backward(grad, x, ids, routing, kept, Layer.of(*layer), to)
    return [gradient for gradient in (of_x, of_routing, *of_weights) if gradient is not None]


def _gradients(tensors: list[Tensor], of: list[Tensor | None], count: int) -> list[MatrixGradients]:
    """Of `count` products, where those of the single tensors go."""
    if stacked(tensors):
        return list(of)
    return [None if all(gradient is None for gradient in each) else each for each in chunks(of, count)]


def _fake_backward(grad: Tensor, x: Tensor, ids: Tensor, routing: Tensor, kept: list[Tensor], *rest: Any) -> Any:
    *layer, needs = rest
    tensors = (x, routing, *_weights(layer))
    return [torch.empty_like(tensor) for tensor, need in zip(tensors, needs, strict=True) if need]


def _weights(layer: list[Any]) -> list[Any]:
    up, up_bias, down, down_bias = layer[:4]
    return [*up, *down, *up_bias, down_bias]


_LAYER = (
    "Tensor[] up, Tensor?[] up_bias, Tensor[] down, Tensor? down_bias, bool gated, bool interleaved, str kind,"
    " float alpha, float? limit, bool limit_after, float up_offset, float? gate_softcap, float? up_softcap"
)
define(
    f"fused_experts_cpu(Tensor x, Tensor ids, Tensor routing, {_LAYER}, bool keep) -> Tensor[]",
    _forward,
    _fake_forward,
)
define(
    f"fused_experts_cpu_backward(Tensor grad, Tensor x, Tensor ids, Tensor routing, Tensor[] kept, {_LAYER},"
    " bool[] needs) -> Tensor[]",
    _backward,
    _fake_backward,
)
