"""Pairs (token, expert) sorted by expert, and rows summed back over the pairs of each token.

Pairs of no expert have no row. A token's rows are an embedding bag, whose kernel reads each row
once and adds in fp32, in slot order, rounded once: 17 to 30 times as fast as gather, multiply and sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.routing import group_by_expert


@dataclass(frozen=True, slots=True)
class Order:
    """Which pair lies in which of R rows, R ≤ S.

    Attributes:
        ends: one past the last row of each expert; on the host, as every loop here asks it.
        pair_R: the pair t·K + k of each row.
        token_R: the token of each row.
        row_R: the rows in the order of their pairs.
        begin_T: where a token's rows begin in `row_R`.
        has_row_S: bool; which pairs have a row; None: all.
    """

    ends: list[int]
    pair_R: Tensor
    token_R: Tensor
    row_R: Tensor
    begin_T: Tensor
    has_row_S: Tensor | None

    @classmethod
    def of(cls, ids_TK: Tensor, num_experts: int) -> "Order":
        """
        >>> order = Order.of(torch.tensor([[1, 0], [1, 2]]), num_experts=2)
        >>> order.ends, order.pair_R.tolist(), order.row_R.tolist(), order.begin_T.tolist()
        ([1, 3], [1, 0, 2], [1, 0, 2], [0, 2])
        """
        T, K = ids_TK.shape
        order = group_by_expert(ids_TK, num_experts)
        assert order.ends_E is not None
        assert order.pair_S is not None
        assert order.row_S is not None
        ends: list[int] = order.ends_E.tolist()
        pair_R, row_R, has_row_S = order.pair_S[: ends[-1]], order.row_S, None
        if ends[-1] < T * K:
            has_row_TK = ~order.no_expert_TK
            has_row_S = has_row_TK.view(-1)
            row_R = row_R[has_row_S]
            count_T = has_row_TK.sum(1)
            begin_T = count_T.cumsum(0) - count_T
        else:
            begin_T = torch.arange(0, T * K, K)
        return cls(ends, pair_R, torch.div(pair_R, K, rounding_mode="floor"), row_R, begin_T, has_row_S)

    def of_pairs(self, values_TK: Tensor) -> Tensor:
        """(R,) of the rows, in the order of their pairs."""
        values_S = values_TK.reshape(-1)
        return values_S if self.has_row_S is None else values_S[self.has_row_S]

    def sum_rows(self, rows_RH: Tensor, weights_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(T, H) in `dtype`: the sum over each token's rows, times the weights if there are any."""
        if not len(rows_RH):
            return rows_RH.new_zeros(len(self.begin_T), rows_RH.shape[1], dtype=dtype)
        row, begin, weights = self.row_R, self.begin_T, None
        if weights_TK is not None:
            weights = self.of_pairs(weights_TK)
            if weights.dtype != rows_RH.dtype == torch.bfloat16:
                # the kernel wants weights like the rows, and a float32 is the sum of three bfloat16
                weights = _three_parts(weights).view(-1)
                row, begin = row.repeat_interleave(3), begin * 3
            weights = weights.to(rows_RH.dtype)
        out: Tensor = torch.embedding_bag(rows_RH, row, begin, False, 0, False, weights, False)[0]
        return out.to(dtype)


def _three_parts(x_R: Tensor) -> Tensor:
    """(R, 3) bfloat16 that add up to x."""
    rest, parts = x_R.float(), []
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts, dim=1)
