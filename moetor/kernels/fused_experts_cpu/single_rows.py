"""Experts with one row: dot products of the row with the rows of the expert's matrix as they lie.

Letters: R rows of x, N output and K input size.
"""

import torch
from torch import Tensor


def takes(w_ENK: Tensor) -> bool:
    """Whether all matrices of a stack are rows of one matrix, each of them contiguous."""
    outer, inner, element = w_ENK.stride()
    return element == 1 and inner > 0 and outer % inner == 0


def multiply_single_rows(row_of: dict[int, int], x_RK: Tensor, w_ENK: Tensor, out_RN: Tensor) -> None:
    """Row r of x times the matrix of expert e, for each r = row_of[e], to row r of `out`.

    The gradient of an embedding bag with respect to the weights of its rows is this, and the only
    operator of PyTorch's that has the loop: a bag is a row of x, and in it are all rows of a matrix.
    It adds in fp32, runs the dot products in parallel, and each of them in one order.
    """
    _, N, K = w_ENK.shape
    outer, inner, _ = w_ENK.stride()
    rows_of_w = w_ENK.as_strided(((len(w_ENK) - 1) * (outer // inner) + N, K), (inner, 1))
    expert_R, row_R = torch.tensor([list(row_of), list(row_of.values())])
    wanted = (expert_R * (outer // inner)).unsqueeze(1) + torch.arange(N)
    bag = row_R.repeat_interleave(N)
    begin = torch.zeros(1, dtype=torch.int64)  # of the bags in `wanted`: not read where `bag` is given
    products = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        x_RK, rows_of_w, wanted.view(-1), begin, bag, 0
    )
    out_RN.index_copy_(0, row_R, products.view(-1, N))
