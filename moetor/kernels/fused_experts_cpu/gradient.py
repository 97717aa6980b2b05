"""Backward: the rows of a few experts at a time, from their kept first products.

The gate's value is computed anew; rows of the second product are not needed: the gradient of a
routing weight is taken before that product, as Σ inner · (grad · w), which has I columns in place of H.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..matmul import matmul, result_dtype
from .blocks import Block, blocks
from .gate import gate_gradient, split
from .operands import Layer, Matrices
from .order import Order

# Of each expert's matrix, or of none; experts with tensors of their own may be frozen one by one.
MatrixGradients = Tensor | list[Tensor | None] | None


@dataclass(frozen=True, slots=True)
class Gradients:
    """Where each gradient goes, laid out as what it is of; None where none is wanted.

    Attributes:
        x_SH: of the rows of x, in expert order, as many as there can be.
        routing_S: of the routing weights, in pair order, zeros.
        ups, up_biases, down, down_bias: of each expert.
    """

    x_SH: Tensor | None
    routing_S: Tensor | None
    ups: Sequence[MatrixGradients]
    up_biases: Sequence[Tensor | None]
    down: MatrixGradients
    down_bias: Tensor | None

    @property
    def of_inner(self) -> bool:
        """Whether any of them lies on the other side of the gate, or is a routing weight's."""
        return self.routing_S is not None or self.of_first

    @property
    def of_first(self) -> bool:
        """Whether any of them lies on the other side of the gate."""
        return self.x_SH is not None or any(g is not None for g in (*self.ups, *self.up_biases))


def backward(
    grad_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, routing_TK: Tensor, kept: list[Tensor], layer: Layer, to: Gradients
) -> tuple[Tensor | None, Tensor | None]:
    """Fill `to`; the gradients of x (T, H) and of the routing weights (T, K), where wanted."""
    order = Order.of(ids_TK, layer.num_experts)
    for block in blocks(order.ends):
        part = slice(block.start, block.stop)
        token_B, pair_B = order.token_R[part], order.pair_R[part]
        weight_B1 = _wide(routing_TK.reshape(-1).index_select(0, pair_B), grad_TH.dtype).unsqueeze(1)
        rows = x_TH.index_select(0, token_B), grad_TH.index_select(0, token_B), weight_B1
        _block(block, rows, pair_B, [product[part] for product in kept], layer, to)
    _clear_experts_without_rows(order.ends, to)
    of_x = None if to.x_SH is None else order.sum_rows(to.x_SH[: order.ends[-1]], None, x_TH.dtype)
    of_routing = None if to.routing_S is None else to.routing_S.view(routing_TK.shape).to(routing_TK.dtype)
    return of_x, of_routing


def _block(
    block: Block,
    rows: tuple[Tensor, Tensor, Tensor],
    pair_B: Tensor,
    products: list[Tensor],
    layer: Layer,
    to: Gradients,
) -> None:
    x_BH, grad_BH, weight_B1 = rows
    part = slice(block.start, block.stop)
    gate, up = split(products, layer.gated, layer.interleaved)
    inner_BI = layer.activation.apply(gate, up)
    if to.down is not None or to.down_bias is not None:
        weighted_BH = (grad_BH * weight_B1).to(result_dtype(grad_BH.dtype))
        _of_matrices(block, weighted_BH, inner_BI, to.down, to.down_bias)
    if not to.of_inner:
        return

    # before the routing weight is applied
    back_BI = inner_BI.new_empty(inner_BI.shape, dtype=result_dtype(grad_BH.dtype))
    _times_matrices(block, grad_BH, layer.down, back_BI, add=False)
    wide_BI = _wide(back_BI, back_BI.dtype)
    if to.routing_S is not None:
        dots_B = (wide_BI * inner_BI).sum(1)
        if layer.down_bias is not None:
            for expert, first, end in block.experts:
                dots_B[first:end] += grad_BH[first:end].to(dots_B.dtype) @ layer.down_bias[expert].to(dots_B.dtype)
        to.routing_S[pair_B] = dots_B
    if not to.of_first:
        return

    grads = [torch.empty_like(product, memory_format=torch.contiguous_format) for product in products]
    wide = [None if half is None else _wide(half, half.dtype) for half in (gate, up)]
    assert wide[0] is not None
    halves = gate_gradient(layer.activation, wide[0], wide[1], wide_BI * weight_B1)
    for into, half in zip(split(grads, layer.gated, layer.interleaved), halves, strict=True):
        if into is not None and half is not None:
            into.copy_(half)
    for grad_BN, of_up, of_bias in zip(grads, to.ups, to.up_biases, strict=True):
        _of_matrices(block, grad_BN, x_BH, of_up, of_bias)
    if to.x_SH is not None:
        for i, (grad_BN, w) in enumerate(zip(grads, layer.ups, strict=True)):
            _times_matrices(block, grad_BN, w, to.x_SH[part], add=i > 0)


def _times_matrices(block: Block, grad_BN: Tensor, w: Matrices, out_BK: Tensor, add: bool) -> None:
    """grad · w with each expert's matrix (N, K)."""
    for expert, first, end in block.experts:
        out = out_BK[first:end]
        if add:
            out += matmul(grad_BN[first:end], w[expert], out.dtype)
        else:
            matmul(grad_BN[first:end], w[expert], out.dtype, out=out)


def _of_matrices(block: Block, grad_BN: Tensor, x_BK: Tensor, of_w: MatrixGradients, of_bias: Tensor | None) -> None:
    """Gradients of each expert's matrix, gradᵀ · x, and of its bias."""
    for expert, first, end in block.experts:
        grad = grad_BN[first:end]
        if of_w is not None and (into := of_w[expert]) is not None:
            matmul(grad.t(), x_BK[first:end], into.dtype, out=into)
        if of_bias is not None:
            of_bias[expert] = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))


def _clear_experts_without_rows(ends: list[int], to: Gradients) -> None:
    without = [expert for expert, end in enumerate(ends) if end == (ends[expert - 1] if expert else 0)]
    for gradient in (*to.ups, to.down, *to.up_biases, to.down_bias):
        if gradient is None:
            continue
        for expert in without:
            if (into := gradient[expert]) is not None:
                into.zero_()


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in float32, or float64 beside float64."""
    return x.to(torch.promote_types(dtype, torch.float32))
