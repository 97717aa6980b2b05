"""All rows times the quantised matrices of their experts, as operators: what grouped_mm and batched_mm are made of.

Letters: S rows, E experts, N output and K input size. Each dequantises what it multiplies and
forgets it: one expert of sorted rows, or a bounded chunk of gathered matrices. Payload and scales
are frozen; gradients reach x as in `linear`. Opaque to torch.compile, so the loops cost no graphs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.formats import FORMATS, Format
from ..core.weights import Weight
from ..kernels.library import autograd_looks_at, define, run
from ..kernels.matmul import matmul
from .activations import round_activations
from .matrices import dequantize


def grouped_product(x_SK: Tensor, weight: Weight, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows sorted by expert: (S, N) in `dtype`, float32 or float64. Rows of no expert are zero.

    Args:
        ends_E: (E,) int32, one past the last row of each expert; read on the host.
    """
    return _product(x_SK, weight, ends_E, dtype, chunk_bytes=0)


def gathered_product(x_SK: Tensor, weight: Weight, expert_S: Tensor, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    """Rows in any order, a matrix gathered for each: (S, N) in `dtype`, float32 or float64; no host sync.

    Args:
        expert_S: (S,) integer, all of them in [0, E).
        chunk_bytes: the most that gathered and dequantised matrices may take at a time.
    """
    assert chunk_bytes > 0
    return _product(x_SK, weight, expert_S, dtype, chunk_bytes)


def _product(x_SK: Tensor, weight: Weight, rows: Tensor, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    """`rows` are ends_E where chunk_bytes is 0, else expert_S; the operators below take them so."""
    arguments = (x_SK, weight.data, weight.scale, weight.activation_scale, rows, weight.format, dtype, chunk_bytes)
    out: Tensor = (_FrozenProduct.apply if autograd_looks_at(x_SK) else _operator)(*arguments)
    return out


def _operator(*arguments: Any) -> Any:
    # two names of one operator: a CUDA graph can hold the one that gathers and not the one that loops
    op = torch.ops.moetor.quantized_product if arguments[-1] else torch.ops.moetor.quantized_product_loop
    return run(op.default, *arguments)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _operator(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        x_SK, data, scale, _, rows, format, _, chunk_bytes = inputs
        ctx.save_for_backward(data, scale, rows)
        ctx.format, ctx.x_dtype, ctx.chunk_bytes = format, x_SK.dtype, chunk_bytes

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SN):  # type: ignore[no-untyped-def]
        data, scale, rows = ctx.saved_tensors
        ops = torch.ops.moetor
        op = ops.quantized_product_gradient if ctx.chunk_bytes else ops.quantized_product_gradient_loop
        grad_x = run(op.default, grad_SN, data, scale, rows, ctx.format, ctx.x_dtype, ctx.chunk_bytes)
        return grad_x, None, None, None, None, None, None, None


def _run(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    static_scale: Tensor | None,
    rows: Tensor,
    format: str,
    dtype: torch.dtype,
    chunk_bytes: int,
) -> Tensor:
    out = x.new_zeros(x.shape[0], data.shape[1], dtype=dtype)
    for some, experts in _pieces(rows, data, FORMATS[format], chunk_bytes):
        static = None if static_scale is None else static_scale[experts].unsqueeze(-1)
        a = round_activations(x[some], FORMATS[format], static, dtype)
        w = _matrices(data, scale, experts, FORMATS[format], dtype)
        out[some] = _rows_times(a, w.mT, dtype)
    return out


def _run_gradient(
    grad: Tensor, data: Tensor, scale: Tensor, rows: Tensor, format: str, dtype: torch.dtype, chunk_bytes: int
) -> Tensor:
    columns = data.shape[2] * FORMATS[format].per_element
    out = grad.new_zeros(grad.shape[0], columns, dtype=dtype)
    for some, experts in _pieces(rows, data, FORMATS[format], chunk_bytes):
        w = _matrices(data, scale, experts, FORMATS[format], grad.dtype)
        out[some] = _rows_times(grad[some], w, dtype)
    return out


def _pieces(rows: Tensor, data: Tensor, format: Format, chunk_bytes: int) -> Iterator[tuple[slice, int | Tensor]]:
    """Which rows meet which matrix: one expert's rows at a time, or a chunk of rows with a matrix each."""
    if not chunk_bytes:
        start = 0
        for expert, end in enumerate(rows.tolist()):
            if end > start:
                yield slice(start, end), expert
            start = end
        return
    # a byte of the payload, the index that decodes it, and the float32 numbers that it holds
    matrix_bytes = data[0].numel() * (1 + 4 + 4 * format.per_element)
    step = max(1, chunk_bytes // matrix_bytes)
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step), rows[start : start + step]


def _matrices(data: Tensor, scale: Tensor, experts: int | Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    if isinstance(experts, int):
        return dequantize(data[experts], scale[experts], format, dtype)
    return dequantize(_gathered(data, experts), _gathered(scale, experts), format, dtype)


def _gathered(stack: Tensor, experts: Tensor) -> Tensor:
    """Torch indexes no float8, but bytes."""
    return stack.view(torch.uint8)[experts].view(stack.dtype) if stack.itemsize == 1 else stack[experts]


def _rows_times(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return matmul(a, b, dtype) if b.dim() == 2 else matmul(a.unsqueeze(1), b, dtype).squeeze(1)


for suffix, syncs in (("", False), ("_loop", True)):
    define(
        f"quantized_product{suffix}(Tensor x, Tensor data, Tensor scale, Tensor? static_scale, Tensor rows, str format,"
        " ScalarType dtype, int chunk_bytes) -> Tensor",
        _run,
        lambda x, data, scale, static_scale, rows, format, dtype, chunk_bytes: x.new_empty(
            x.shape[0], data.shape[1], dtype=dtype
        ),
        gradient=_FrozenProduct,
        syncs=syncs,
    )
    define(
        f"quantized_product_gradient{suffix}(Tensor grad, Tensor data, Tensor scale, Tensor rows, str format,"
        " ScalarType dtype, int chunk_bytes) -> Tensor",
        _run_gradient,
        lambda grad, data, scale, rows, format, dtype, chunk_bytes: grad.new_empty(
            grad.shape[0], data.shape[2] * FORMATS[format].per_element, dtype=dtype
        ),
        syncs=syncs,
    )
