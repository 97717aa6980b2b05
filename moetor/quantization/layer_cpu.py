"""A whole layer of quantised experts on the CPU: sort, then per expert product, gate, product; add. Inference.

Rows of experts that have few are multiplied with the packed bytes (kernels/packed_experts_cpu), in float32; those of
others, and all where there is no compiler, with one dequantised matrix at a time. Activations are rounded by
`round_activations`, as everywhere. One operator, opaque to torch.compile.

Letters: T tokens, K experts per token, R rows of pairs that have an expert, E experts, H hidden size, I intermediate
size, N output size of one matrix.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.formats import FORMATS, Format
from ..core.weights import ExpertWeights
from ..kernels import packed_experts_cpu as packed
from ..kernels.fused_experts_cpu.blocks import blocks
from ..kernels.fused_experts_cpu.gate import split
from ..kernels.fused_experts_cpu.operands import Layer, Matrices, matrices
from ..kernels.fused_experts_cpu.order import Order
from ..kernels.library import define
from ..kernels.matmul import matmul
from .activations import round_activations
from .linear import compute_dtype
from .matrices import dequantize

# Rows of one expert up to which decoding in registers, once for four rows, is not slower than once for all, in memory.
FEW_ROWS = 32


def quantized_layer(weights: ExpertWeights, x_TH: Tensor, ids_TK: Tensor, routing_TK: Tensor) -> Tensor:
    """The layer's result (T, H) in the dtype of x; no gradients."""
    a = weights.activation
    ups, down = weights.ups, weights.down
    run = torch.ops.moetor.quantized_layer_cpu if torch.compiler.is_compiling() else _run
    out: Tensor = run(
        x_TH, ids_TK, routing_TK, weights.format,
        [t for up in ups for t in _tensors(up.data)], [t for up in ups for t in _tensors(up.scale)],
        [up.bias_EN() for up in ups], [up.activation_scale for up in ups],
        _tensors(down.data), _tensors(down.scale), down.bias_EN(), down.activation_scale,
        weights.gated, weights.interleaved, a.kind, a.alpha, a.limit, a.limit_after, a.up_offset,
        a.gate_softcap, a.up_softcap,
    )  # fmt: skip
    return out


def describe() -> str:
    """How such a layer is run here, for people."""
    rest = "one dequantised matrix at a time"
    compiler = packed.compiler()
    if compiler is None:
        return f"{rest}, as there is no C++ compiler (CXX names one)"
    return f"products with the packed bytes, by code of {compiler}; from {FEW_ROWS + 1} rows of an expert, {rest}"


def _tensors(part: Any) -> list[Tensor]:
    return part if isinstance(part, list) else [part]


def _run(
    x: Tensor, ids: Tensor, routing: Tensor, format: str,
    up: list[Tensor], up_scale: list[Tensor], up_bias: list[Tensor | None], up_static: list[Tensor | None],
    down: list[Tensor], down_scale: list[Tensor], down_bias: Tensor | None, down_static: Tensor | None, *gate: Any,
) -> Tensor:  # fmt: skip
    layer = Layer.of(up, up_bias, down, down_bias, *gate)
    scales, (of_down,) = matrices(up_scale, len(up_bias)), matrices(down_scale, 1)
    kind, dtype = FORMATS[format], compute_dtype(x.dtype)
    with without_autocast("cpu"):
        order = Order.of(ids, layer.num_experts)
        rows_RH = x.new_empty(order.ends[-1], x.shape[1], dtype=dtype)
        for block in blocks(order.ends):
            part = slice(block.start, block.stop)
            x_BH = x.index_select(0, order.token_R[part])
            products = [
                _product(block.experts, x_BH, one, scale, bias, static, kind, dtype)
                for one, scale, bias, static in zip(layer.ups, scales, layer.up_biases, up_static, strict=True)
            ]
            inner_BI = layer.activation.apply(*split(products, layer.gated, layer.interleaved))
            rows_RH[part] = _product(block.experts, inner_BI, layer.down, of_down, down_bias, down_static, kind, dtype)
        return order.sum_rows(rows_RH, routing, x.dtype)


def _product(
    experts: list[tuple[int, int, int]], x_BK: Tensor, data: Matrices, scale: Matrices, bias_EN: Tensor | None,
    static_E: Tensor | None, format: Format, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """(B, N): each expert's rows times its matrix, plus its bias."""
    of_row = None
    if static_E is not None:
        of_row = torch.cat([static_E[expert].expand(end - first) for expert, first, end in experts]).unsqueeze(1)
    a_BK = round_activations(x_BK, format, of_row, dtype).contiguous()
    out_BN = a_BK.new_empty(a_BK.shape[0], data[0].shape[0])
    few = [each for each in experts if each[2] - each[1] <= FEW_ROWS]
    if dtype == torch.float32 and few and packed.takes(data[0], scale[0]) and packed.available():
        assert format.block is not None
        if isinstance(data, Tensor) and isinstance(scale, Tensor):
            packed.packed_rows(a_BK, few, data, scale, format.block, out_BN)
        else:
            for expert, first, end in few:
                one = [(0, first, end)]
                packed.packed_rows(a_BK, one, data[expert][None], scale[expert][None], format.block, out_BN)
        rest = [each for each in experts if each not in few]
    else:
        rest = experts
    for expert, first, end in rest:
        w_NK = dequantize(data[expert], scale[expert], format, dtype)
        matmul(a_BK[first:end], w_NK.t(), dtype, out=out_BN[first:end])
    if bias_EN is not None:
        for expert, first, end in experts:
            out_BN[first:end] += bias_EN[expert].to(dtype)
    return out_BN


define(
    "quantized_layer_cpu(Tensor x, Tensor ids, Tensor routing, str format, Tensor[] up, Tensor[] up_scale,"
    " Tensor?[] up_bias, Tensor?[] up_static, Tensor[] down, Tensor[] down_scale, Tensor? down_bias,"
    " Tensor? down_static, bool gated, bool interleaved, str kind, float alpha, float? limit, bool limit_after,"
    " float up_offset, float? gate_softcap, float? up_softcap) -> Tensor",
    _run,
    lambda x, *_: x.new_empty(x.shape),
)
