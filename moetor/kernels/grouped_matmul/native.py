"""The grouped product of PyTorch itself: bf16 on NVIDIA GPUs from SM80, no host sync.

It wants every stride and pointer to be a multiple of 16 bytes, leaves rows of no expert
unwritten, and refuses upstream gradients of stride 0; what it cannot take goes to the fallback.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.autocast import without_autocast

# torch 2.9 has it under its private name only.
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


def can_run(a: Tensor, b_ENK: Tensor, dtype: torch.dtype) -> bool:
    """Whether PyTorch's grouped product takes these operands without copying the weights."""
    return a.is_cuda and may_run(a, b_ENK, dtype) and a.shape[0] > 0 and device_has_it(a.device) and _aligned(b_ENK)


def may_run(a: Tensor, b_ENK: Tensor, dtype: torch.dtype) -> bool:
    """What of it dtypes and sizes decide, which tracing knows."""
    return a.dtype == dtype == torch.bfloat16 and _takes_sizes(b_ENK)


def takes_layout(w_ENK: Tensor) -> bool:
    """Whether it takes matrices of this dtype, sizes, strides and start, whatever rows they meet."""
    return _takes_sizes(w_ENK) and _aligned(w_ENK)


def _takes_sizes(w_ENK: Tensor) -> bool:
    return w_ENK.dtype == torch.bfloat16 and w_ENK.shape[1] % 8 == 0 and w_ENK.shape[2] % 8 == 0


def can_run_gradient(grad_SN: Tensor, x_SK: Tensor, dtype: torch.dtype) -> bool:
    """The same for the gradient of the weights, a product over the rows of each expert."""
    return (
        grad_SN.is_cuda
        and may_run_gradient(grad_SN, x_SK, dtype)
        and grad_SN.shape[0] > 0
        and device_has_it(grad_SN.device)
    )


def may_run_gradient(grad_SN: Tensor, x_SK: Tensor, dtype: torch.dtype) -> bool:
    """What of it dtypes and sizes decide."""
    bf16 = grad_SN.dtype == x_SK.dtype == dtype == torch.bfloat16
    return bf16 and grad_SN.shape[1] % 8 == 0 and x_SK.shape[1] % 8 == 0


def grouped_matmul(x_SK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """See the package."""
    with without_autocast(x_SK.device.type):
        out: Tensor = _grouped_mm(_dense_rows(x_SK), w_ENK.transpose(1, 2), offs=ends_E)
    return out


def weight_gradient(grad_SN: Tensor, x_SK: Tensor, ends_E: Tensor) -> Tensor:
    """See the package."""
    with without_autocast(x_SK.device.type):
        out: Tensor = _grouped_mm(_dense_rows(grad_SN).t(), _dense_rows(x_SK), offs=ends_E)
    return out


@functools.cache
def _has_it(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 0)


def device_has_it(device: torch.device) -> bool:
    """Whether a CUDA device has it: NVIDIA, SM80 or newer."""
    return _has_it(torch.cuda.current_device() if device.index is None else device.index)


def _dense_rows(x: Tensor) -> Tensor:
    """Rows at 16-byte strides: x itself where it has them; a copy is small beside the weights."""
    return (
        x
        if x.stride(-1) == 1 and x.stride(0) == x.shape[1] and _start_aligned(x)
        else x.clone(memory_format=torch.contiguous_format)
    )


def _aligned(w_ENK: Tensor) -> bool:
    outer, rows, columns = w_ENK.stride()
    leading = rows if columns == 1 else columns if rows == 1 else 1
    return leading % 8 == 0 and outer % 8 == 0 and _start_aligned(w_ENK)


def _start_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0
