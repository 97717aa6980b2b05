"""The op in plain torch, from a table of what each byte means."""

import torch
from torch import Tensor


def packed_rows(
    x_RK: Tensor,
    experts: list[tuple[int, int, int]],
    data_ENP: Tensor,
    scale_EGH: Tensor,
    numbers: Tensor,
    block: tuple[int, int],
) -> Tensor:
    """See `packed_rows` of this package.

    Args:
        numbers: (256, numbers a byte holds), what each byte means.
    """
    out = x_RK.new_empty(x_RK.shape[0], data_ENP.shape[1])
    for expert, first, end in experts:
        values = numbers[data_ENP[expert].view(torch.uint8).long()].flatten(1)
        rows, columns = (torch.arange(size) // width for size, width in zip(values.shape, block, strict=True))
        out[first:end] = x_RK[first:end] @ (values * scale_EGH[expert].float()[rows][:, columns]).t()
    return out
