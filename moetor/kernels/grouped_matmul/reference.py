"""What the grouped product means, in plain torch."""

import torch
from torch import Tensor


def grouped_matmul(x_SK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """See the package; rows of no expert are zero."""
    parts, start = [], 0
    for end, w_NK in zip(ends_E.tolist(), w_ENK, strict=True):
        parts.append(x_SK[start:end] @ w_NK.t())
        start = end
    return torch.cat([*parts, x_SK.new_zeros(x_SK.shape[0] - start, w_ENK.shape[1])])
