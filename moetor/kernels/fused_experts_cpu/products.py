"""x · wᵀ by the code that is fastest at it here: a choice by dtype, strides and sizes, never by a clock.

Letters: R rows, m of them one expert's, N output and K input size. Figures: 2 cores of an AMD EPYC (Zen 4), torch 2.13,
weights from memory.

- float32 goes to oneDNN directly; PyTorch's own product is MKL's there. With a 2816 × 2048 matrix oneDNN takes
  1.1 ms for 4 rows and 4.4 for 68, MKL 2.6 and 5.8. For some numbers of rows it is faster still to let the operands
  change places, since its kernels read the first as it lies and pack the second: 1.2 ms in place of 1.7 for 16 rows.
- bfloat16 goes to PyTorch's product, which is oneDNN's already. An expert's only row does not: packing the matrix for
  it reads 18 GB/s, dot products with the matrix as it lies 28, of the 30 that this machine has.
- Everything else, other storage orders among it, goes to PyTorch's product: oneDNN's linear takes rows of other
  strides, and is a thousand times slower at them.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..matmul import matmul
from . import single_rows
from .operands import Matrices

# Below this many elements of a matrix 12 µs more for a call of oneDNN's are not won back.
_ONEDNN_NUMEL = 2**16
# Its kernels work on 16 columns at a time: x as the packed operand has to fill most of them, and beyond 32 rows all.
_SWAPPED_ROWS = frozenset((*range(10, 17), *range(24, 33), 48, 64))

# (x (m, K), w (N, K), bias (N) or None, out (m, N)): writes out.
Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]


def multiply(
    experts: list[tuple[int, int, int]], x_RK: Tensor, w: Matrices, bias_EN: Tensor | None, out_RN: Tensor
) -> None:
    """Write x · wᵀ + bias to `out`, each expert's rows with its own matrix and bias.

    Args:
        experts: (expert, first row, one past its last row).
        x_RK, out_RN: `out` may be wider than x; weights and biases follow them in dtype.
    """
    if bias_EN is None and x_RK.dtype == out_RN.dtype and isinstance(w, Tensor) and _by_dot_products(w, x_RK.dtype):
        alone = {expert: first for expert, first, end in experts if end - first == 1}
        if alone:
            single_rows.multiply_single_rows(alone, x_RK, w, out_RN)
            experts = [each for each in experts if each[0] not in alone]
    alike = isinstance(w, Tensor)  # and then all matrices get the same product
    product = _product(w[0], x_RK.dtype, out_RN.dtype)
    for expert, first, end in experts:
        w_NK = w[expert]
        bias_N = None if bias_EN is None else bias_EN[expert].to(out_RN.dtype)
        if not alike:
            product = _product(w_NK, x_RK.dtype, out_RN.dtype)
        product(x_RK[first:end], w_NK, bias_N, out_RN[first:end])


def describe(w: Matrices, dtype: torch.dtype) -> str:
    """By which of them such weights are multiplied with activations of `dtype`, for people."""
    if _product(w[0].to("meta").to(dtype), dtype, dtype) is _onednn:
        return "oneDNN"
    return "torch.mm" + (" and, for an expert's only row, dot products" if _by_dot_products(w, dtype) else "")


def _product(w_NK: Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> Product:
    if w_NK.dtype != dtype:
        return _converted
    if out_dtype != dtype:
        return _wider
    contiguous = w_NK.stride() == (w_NK.shape[1], 1)
    if dtype == torch.float32 and contiguous and w_NK.numel() >= _ONEDNN_NUMEL and _onednn_is_fast():
        return _onednn
    return _torch


def _by_dot_products(w: Matrices, dtype: torch.dtype) -> bool:
    return isinstance(w, Tensor) and w.dtype == dtype == torch.bfloat16 and single_rows.takes(w)


def _onednn_is_fast() -> bool:
    """On x86, where it was measured; elsewhere PyTorch's product is built on what that machine's vendor gives."""
    return bool(torch.backends.mkldnn.enabled) and _machine_has_onednn()


@functools.cache
def _machine_has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _onednn(x_mK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_mN: Tensor) -> None:
    linear = torch.ops.mkldnn._linear_pointwise.default
    if x_mK.shape[0] not in _SWAPPED_ROWS:
        out_mN.copy_(linear(x_mK, w_NK, bias_N, "none", [], ""))
    else:
        out_mN.copy_(linear(w_NK, x_mK, None, "none", [], "").t())
        if bias_N is not None:
            out_mN += bias_N


def _torch(x_mK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_mN: Tensor) -> None:
    if bias_N is None:
        torch.mm(x_mK, w_NK.t(), out=out_mN)
    else:
        torch.addmm(bias_N, x_mK, w_NK.t(), out=out_mN)


def _converted(x_mK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_mN: Tensor) -> None:
    w_NK = w_NK.to(x_mK.dtype)
    _product(w_NK, x_mK.dtype, out_mN.dtype)(x_mK, w_NK, bias_N, out_mN)


def _wider(x_mK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_mN: Tensor) -> None:
    matmul(x_mK, w_NK.t(), out_mN.dtype, out=out_mN)
    if bias_N is not None:
        out_mN += bias_N
