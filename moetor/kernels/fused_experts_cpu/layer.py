"""Forward: the rows of a few experts at a time through both products, then the weighted sum."""

from torch import Tensor

from ..matmul import result_dtype
from .blocks import blocks
from .gate import split
from .operands import Layer
from .order import Order
from .products import multiply


def forward(x_TH: Tensor, ids_TK: Tensor, routing_TK: Tensor, layer: Layer, keep: bool) -> list[Tensor]:
    """The result (T, H); with `keep` the first products, S rows in expert order, after it."""
    order = Order.of(ids_TK, layer.num_experts)
    sizes = [up[0].shape[0] for up in layer.ups]
    kept = [x_TH.new_empty(ids_TK.numel(), N) for N in sizes] if keep else []
    rows_RH = x_TH.new_empty(order.ends[-1], x_TH.shape[1], dtype=result_dtype(x_TH.dtype))
    for block in blocks(order.ends):
        part = slice(block.start, block.stop)
        x_BH = x_TH.index_select(0, order.token_R[part])
        products = [first[part] for first in kept] or [x_TH.new_empty(len(x_BH), N) for N in sizes]
        for up, bias, product in zip(layer.ups, layer.up_biases, products, strict=True):
            multiply(block.experts, x_BH, up, bias, product)
        inner_BI = layer.activation.apply(*split(products, layer.gated, layer.interleaved))
        multiply(block.experts, inner_BI, layer.down, layer.down_bias, rows_RH[part])
    return [order.sum_rows(rows_RH, routing_TK, x_TH.dtype), *kept]
