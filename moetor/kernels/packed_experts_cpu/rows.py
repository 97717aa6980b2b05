"""The compiled function, called with tensors.

Letters: R rows, E experts, N output and K input size, P bytes of K numbers.
"""

import torch
from torch import Tensor

from .build import function


def available() -> bool:
    """Whether there is compiled code; the first call on a machine compiles it, which takes seconds."""
    return function() is not None


def takes(data: Tensor, scale: Tensor) -> bool:
    """Whether payload and scales lie as the code reads them: the columns of a row side by side."""
    return data.stride(-1) == 1 and (scale.stride(-1) == 1 or scale.shape[-1] == 1)


def packed_rows(
    x_RK: Tensor,
    experts: list[tuple[int, int, int]],
    data_ENP: Tensor,
    scale_E: Tensor,
    block: tuple[int, int],
    out_RN: Tensor,
) -> None:
    """Write x · wᵀ to `out`, each expert's rows with its own matrix, which is read as it is packed.

    Args:
        x_RK: (R, K) float32, contiguous.
        experts: (expert, first row, one past its last row).
        data_ENP: (E, N, K) e4m3, or (E, N, K/2) bytes of two e2m1, low nibble first; see `takes`.
        scale_E: (E, …), of each block of a matrix, float32 or one byte of e8m0.
        block: its rows and columns; 0: all.
        out_RN: (R, N) float32, contiguous. Rows of no expert are not written.
    """
    _, N, P = data_ENP.shape
    K = x_RK.shape[1]
    bits = 8 * P // K if K else 8
    if bits == 4:
        # even columns first, as the low nibbles are
        x_RK = x_RK.view(-1, P, 2).transpose(1, 2).contiguous()
    items = torch.tensor(experts, dtype=torch.int64)
    size = scale_E.element_size()
    high, wide = block[0] or N, block[1] or K
    function()(
        bits, x_RK.data_ptr(), out_RN.data_ptr(), items.data_ptr(), len(experts),
        data_ENP.data_ptr(), data_ENP.stride(0), data_ENP.stride(1),
        scale_E.data_ptr(), size * scale_E.stride(0), size * scale_E.stride(1), size,
        high, wide, N, K, torch.get_num_threads(),
    )  # fmt: skip
