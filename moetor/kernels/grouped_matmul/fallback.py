"""The grouped product as a loop over the experts that have rows: every dtype, stride, alignment.

Each expert's matrix is read where it lies; one that needs another dtype is converted alone, so
there is never a copy of the stack. Reads `ends_E` on the host: on a GPU that is a sync.
"""

import torch
from torch import Tensor

from ...core.autocast import without_autocast
from ..matmul import matmul_as_it_is


def grouped_matmul(x_SK: Tensor, w_ENK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """See the package; rows of no expert are zero."""
    out_SN = x_SK.new_empty(x_SK.shape[0], w_ENK.shape[1], dtype=dtype)
    if not x_SK.shape[0]:
        return out_SN
    w_EKN, start = w_ENK.transpose(1, 2), 0
    with without_autocast(x_SK.device.type):
        for expert, end in enumerate(ends_E.tolist()):
            if end > start:
                matmul_as_it_is(x_SK[start:end], w_EKN[expert], dtype, out_SN[start:end])
                start = end
    if start < x_SK.shape[0]:
        out_SN[start:].zero_()
    return out_SN


def weight_gradient(grad_SN: Tensor, x_SK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """See the package."""
    out_ENK = grad_SN.new_empty(ends_E.shape[0], grad_SN.shape[1], x_SK.shape[1], dtype=dtype)
    if not x_SK.shape[0]:
        return out_ENK.zero_()
    start = 0
    with without_autocast(grad_SN.device.type):
        for expert, end in enumerate(ends_E.tolist()):
            if end > start:
                matmul_as_it_is(grad_SN[start:end].t(), x_SK[start:end], dtype, out_ENK[expert])
            else:
                out_ENK[expert].zero_()
            start = end
    return out_ENK
