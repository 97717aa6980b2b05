"""What the gathered product means, in plain torch."""

import torch
from torch import Tensor


def gathered_matmul(x_SK: Tensor, w_ENK: Tensor, expert_S: Tensor) -> Tensor:
    """See the package; rows of no expert are zero."""
    rows = [
        x_K @ w_ENK[e].t() if e < w_ENK.shape[0] else x_K.new_zeros(w_ENK.shape[1])
        for x_K, e in zip(x_SK, expert_S.tolist(), strict=True)
    ]
    return torch.stack(rows) if rows else x_SK.new_zeros(0, w_ENK.shape[1])
