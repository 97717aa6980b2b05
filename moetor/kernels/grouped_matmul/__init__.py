"""Rows sorted by expert times each expert's matrix, with gradients.

Letters: S rows, E experts, N output and K input size. Rows past ends_E[-1] belong to no expert:
what they hold on return is not defined, in the result and in the gradient of x.
"""

import torch
from torch import Tensor

from ..library import autograd_looks_at
from . import ops as _ops  # noqa: F401  registers the operators
from .gradient import GroupedMatmul, product, weight_gradient

__all__ = ["grouped_matmul", "weight_gradient"]


def grouped_matmul(x_SK: Tensor, w_ENK: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Row s of expert e: x_SK[s] · w_ENK[e]ᵀ, (S, N) in `dtype`.

    PyTorch's grouped product where it takes the operands (no host sync), else a loop over the
    experts, which takes every dtype, stride and alignment.

    Args:
        x_SK: (S, K), rows of an expert adjacent, experts in order.
        w_ENK: (E, N, K), any strides.
        ends_E: (E,) int32, one past the last row of each expert.

    >>> x, w = torch.tensor([[1.0], [2.0]]), torch.tensor([[[10.0]], [[20.0]]])
    >>> grouped_matmul(x, w, torch.tensor([1, 2], dtype=torch.int32), torch.float32).tolist()
    [[10.0], [40.0]]
    """
    run = GroupedMatmul.apply if autograd_looks_at(x_SK, w_ENK) else product
    out: Tensor = run(x_SK, w_ENK, ends_E, dtype)
    return out
