"""Pairs (token, expert) in the order that a backend wants, and back to tokens.

Letters: T tokens, K experts per token, S = T·K routed pairs, E experts, H any row size. A pair's
number is t·K + k. A row is a pair's place in the backend's order. Rows of pairs without an
expert may hold anything, NaN included: they are selected away here, never multiplied by zero.

A contribution, row times routing weight, is computed in fp32 and stored in the wider of the two dtypes.
Sums over K run in fp32 (float64 for float64 rows), in slot order, without atomics, and are
rounded once; so the same call gives the same bits on every run.

At a few tokens a GPU waits for the host, and every operator costs it 5 µs or more: each line that
is one more operator here has to earn it (tests/backends/test_operators_of_a_call.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .errors import InvalidInput

# Elements of the temporary (tokens, K, H) that _sum_pairs fills at a time: on CPU it should stay in
# the caches, and in memory that malloc keeps, as a page that is new costs more than what is done in
# it; on a GPU one launch should do unless memory would notice.
_CHUNK_CPU, _CHUNK_GPU = 2**18, 2**26


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Which pair lies in which row. Made by the two functions below, read by the others here.

    Attributes:
        num_experts: E.
        no_expert_TK: (T, K) bool, the id lies outside [0, E).
        expert_S: (S,) the expert of each row; for rows of no expert E or more where rows are sorted,
            some expert whose tensors may be read where they are in pair order.
        pair_S: (S,) the pair in each row; None when rows are in pair order.
        row_S: (S,) the row of each pair; None likewise.
        ends_E: (E,) int32, one past the last row of each expert; None when rows are in pair order.
    """

    num_experts: int
    no_expert_TK: Tensor
    expert_S: Tensor
    pair_S: Tensor | None = None
    row_S: Tensor | None = None
    ends_E: Tensor | None = None

    def no_expert_S(self) -> Tensor:
        """(S,) bool, which rows belong to no expert."""
        return self.no_expert_TK.reshape(-1) if self.pair_S is None else self.expert_S >= self.num_experts


def group_by_expert(top_k_index: Tensor, num_experts: int) -> ExpertOrder:
    """Sort the pairs so that each expert's rows are adjacent.

    The sort is stable: within an expert, rows keep the order of their tokens.

    Args:
        top_k_index: (T, K) integer; an id outside [0, num_experts) means "no expert here" (a pair
            that another rank owns, padding) and sorts last.
        num_experts: E, experts held by this rank.

    Returns:
        The order; `ends_E[-1]` rows have an expert, the rest have none.

    Raises:
        InvalidInput: `top_k_index` is not two-dimensional.

    >>> order = group_by_expert(torch.tensor([[1, 0], [1, 2]]), num_experts=2)
    >>> order.pair_S.tolist(), order.ends_E.tolist()
    ([1, 0, 2, 3], [1, 3])
    """
    _require_two_dimensions(top_k_index)
    # negative ids to E, so that what is no expert sorts last
    expert_TK = torch.threshold(top_k_index, -1, num_experts)
    no_expert_TK = expert_TK >= num_experts
    expert_S, pair_S = torch.sort(expert_TK.reshape(-1), stable=True)
    S = expert_S.shape[0]
    # one operator for what is two: the rows, and the experts
    numbers = torch.arange(S + num_experts, device=expert_S.device, dtype=expert_S.dtype)
    row_S = torch.empty_like(expert_S).scatter_(0, pair_S, numbers[:S])
    ends_E = ends_of_experts(expert_S, numbers[:num_experts])
    return ExpertOrder(num_experts, no_expert_TK, expert_S, pair_S, row_S, ends_E)


def ends_of_experts(expert_S: Tensor, experts: Tensor) -> Tensor:
    """(E,) int32, one past the last row of each of the experts 0 … E - 1, from the sorted experts of the rows.

    >>> ends_of_experts(torch.tensor([0, 2, 2, 3]), torch.arange(3)).tolist()
    [1, 1, 3]
    """
    if not expert_S.shape[0]:  # inductor of torch 2.11 cannot compile a search in nothing
        return torch.zeros_like(experts, dtype=torch.int32)
    return torch.searchsorted(expert_S, experts, right=True, out_int32=True)


def keep_pair_order(top_k_index: Tensor, num_experts: int) -> ExpertOrder:
    """Leave the pairs as they are, one row a pair.

    >>> order = keep_pair_order(torch.tensor([[1, 0], [1, 2]]), num_experts=2)
    >>> order.expert_S.tolist(), order.no_expert_TK.tolist()
    ([1, 0, 1, 1], [[False, False], [False, True]])
    """
    _require_two_dimensions(top_k_index)
    expert_TK = top_k_index.clamp(0, num_experts - 1)
    return ExpertOrder(num_experts, expert_TK != top_k_index, expert_TK.reshape(-1))


def _require_two_dimensions(top_k_index: Tensor) -> None:
    if top_k_index.dim() != 2:
        raise InvalidInput(f"top_k_index must have shape (T, K), got {tuple(top_k_index.shape)}")


def gather_tokens(x_TH: Tensor, order: ExpertOrder) -> Tensor:
    """The row of x that each pair reads, (S, H), in the backend's order.

    The gradient of x sums over a token's pairs in slot order; pairs of no expert add nothing.

    >>> order = group_by_expert(torch.tensor([[1, 0], [1, 2]]), num_experts=2)
    >>> gather_tokens(torch.tensor([[1.0], [2.0]]), order).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    if not _needs_grad(x_TH):
        return _take_tokens(x_TH, order.pair_S, order.no_expert_TK)
    out: Tensor = _GatherTokens.apply(x_TH, order.pair_S, order.row_S, order.no_expert_TK)
    return out


def combine(rows_SH: Tensor, top_k_weights: Tensor, order: ExpertOrder, dtype: torch.dtype) -> Tensor:
    """Add each token's rows, weighted, (T, H): Σ_k top_k_weights[t, k] · row of the pair (t, k).

    Args:
        rows_SH: (S, H) results of the experts, in the backend's order.
        top_k_weights: (T, K), any float dtype; applied in fp32.
        order: from `group_by_expert` or `keep_pair_order`.
        dtype: of the result.

    >>> order = group_by_expert(torch.tensor([[1, 0], [1, 2]]), num_experts=2)
    >>> rows = torch.tensor([[10.0], [20.0], [30.0], [float("nan")]])
    >>> combine(rows, torch.tensor([[0.5, 1.0], [1.0, 9.0]]), order, torch.float32).tolist()
    [[20.0], [30.0]]
    """
    if not _needs_grad(rows_SH, top_k_weights):
        return _sum_pairs(rows_SH, top_k_weights, order.row_S, order.no_expert_TK, dtype)
    out: Tensor = _Combine.apply(rows_SH, top_k_weights, order.pair_S, order.row_S, order.no_expert_TK, dtype)
    return out


def expert_bias(bias_EN: Tensor, order: ExpertOrder) -> Tensor:
    """The bias that each row gets, (S, N); rows of no expert get some expert's.

    >>> order = group_by_expert(torch.tensor([[1, 0]]), num_experts=2)
    >>> expert_bias(torch.tensor([[5.0], [7.0]]), order).flatten().tolist()
    [5.0, 7.0]
    """
    if not _needs_grad(bias_EN):
        return _take_bias(bias_EN, order.expert_S)
    out: Tensor = _ExpertBias.apply(bias_EN, order.expert_S, order.no_expert_S())
    return out


def clear_rows_of_no_expert(rows_SH: Tensor, order: ExpertOrder) -> Tensor:
    """Zero those rows, in the value and in the gradient.

    For functions that a model brings along and that may have parameters: a NaN in a row that
    nobody reads would still reach the parameters' gradients.
    """
    return rows_SH.masked_fill(order.no_expert_S()[:, None], 0)


def _needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd has to see what is done with them; 5 µs a function where it has not."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _tokens(pair_S: Tensor | None, no_expert_TK: Tensor) -> Tensor:
    """(S,) the token of each row."""
    T, K = no_expert_TK.shape
    pair_S = torch.arange(T * K, device=no_expert_TK.device) if pair_S is None else pair_S
    return torch.div(pair_S, K, rounding_mode="floor")


def _take_tokens(x_TH: Tensor, pair_S: Tensor | None, no_expert_TK: Tensor) -> Tensor:
    (T, H), K = x_TH.shape, no_expert_TK.shape[1]
    # the rows of one token are alike in any order; T may be symbolic while compiling
    if pair_S is None or (not torch.compiler.is_compiling() and T == 1):
        return x_TH.unsqueeze(1).expand(T, K, H).reshape(T * K, H)
    return x_TH.index_select(0, _tokens(pair_S, no_expert_TK))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    # torch.compile of torch 2.11 loses the gradient of a Function whose result has been through a
    # `.to` that changes nothing
    return x if x.dtype == dtype else x.to(dtype)


def _by_chunks(num_rows: int, row_elements: int, device: torch.device) -> list[slice]:
    """Slices of the tokens, so that a temporary of `row_elements` a token stays bounded."""
    if torch.compiler.is_compiling():
        return [slice(None)]  # inductor fuses the whole expression; a loop would cost graphs
    step = max(1, (_CHUNK_CPU if device.type == "cpu" else _CHUNK_GPU) // max(1, row_elements))
    return [slice(start, start + step) for start in range(0, max(num_rows, 1), step)]


def _sum_pairs(
    rows_SH: Tensor, weights_TK: Tensor | None, row_S: Tensor | None, no_expert_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """(T, H): the sum over each token's pairs, times the weights if there are any."""
    T, K = no_expert_TK.shape
    slices = _by_chunks(T, K * rows_SH.shape[-1], rows_SH.device)
    if len(slices) == 1:
        return _sum_chunk(rows_SH, weights_TK, row_S, no_expert_TK, dtype)
    out_TH = rows_SH.new_empty(T, rows_SH.shape[-1], dtype=dtype)
    for part in slices:
        pairs = slice(part.start * K, part.stop * K)
        rows = rows_SH[pairs] if row_S is None else rows_SH
        row = None if row_S is None else row_S[pairs]
        weights = None if weights_TK is None else weights_TK[part]
        out_TH[part] = _sum_chunk(rows, weights, row, no_expert_TK[part], dtype)
    return out_TH


def _sum_chunk(
    rows_SH: Tensor, weights_TK: Tensor | None, row_S: Tensor | None, no_expert_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same in one go."""
    (T, K), H = no_expert_TK.shape, rows_SH.shape[-1]
    terms = (rows_SH if row_S is None else rows_SH.index_select(0, row_S)).view(T, K, H)
    if weights_TK is not None:
        terms = terms * _applied(weights_TK, rows_SH.dtype).unsqueeze(-1)
    elif row_S is None:
        terms = terms.clone()  # the caller's own rows are not to be filled
    terms.masked_fill_(no_expert_TK.unsqueeze(-1), 0)
    if terms.dtype == dtype:
        return terms.sum(1)  # half precision is summed in fp32, and rounded once
    return _rounded(terms.sum(1, dtype=_accumulator(terms.dtype)), dtype)


def _applied(weights_TK: Tensor, rows_dtype: torch.dtype) -> Tensor:
    """Routing weights as they are multiplied with rows of this dtype: alike, or in fp32."""
    acc = _accumulator(rows_dtype)
    return weights_TK if weights_TK.dtype in (rows_dtype, acc) else weights_TK.to(acc)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, pair_S, row_S, no_expert_TK):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(row_S, no_expert_TK)
        return _take_tokens(x_TH, pair_S, no_expert_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SH):  # type: ignore[no-untyped-def]
        row_S, no_expert_TK = ctx.saved_tensors
        return _sum_pairs(grad_SH.contiguous(), None, row_S, no_expert_TK, grad_SH.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_SH, weights_TK, pair_S, row_S, no_expert_TK, dtype):  # type: ignore[no-untyped-def]
        needs_rows = ctx.needs_input_grad[1]
        ctx.save_for_backward(rows_SH if needs_rows else None, weights_TK, pair_S, row_S, no_expert_TK)
        ctx.rows_dtype = rows_SH.dtype
        return _sum_pairs(rows_SH, weights_TK, row_S, no_expert_TK, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):  # type: ignore[no-untyped-def]
        rows_SH, weights_TK, pair_S, row_S, no_expert_TK = ctx.saved_tensors
        T, K = weights_TK.shape
        H = grad_TH.shape[-1]
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            weight_S = _applied(weights_TK, ctx.rows_dtype).masked_fill(no_expert_TK, 0).reshape(-1)
            weight_S = weight_S if pair_S is None else weight_S.index_select(0, pair_S)
            token_S = _tokens(pair_S, no_expert_TK)
            parts = [
                _rounded(grad_TH.index_select(0, token_S[part]) * weight_S[part, None], ctx.rows_dtype)
                for part in _by_chunks(T * K, H, grad_TH.device)
            ]
            grad_rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        if ctx.needs_input_grad[1]:
            acc = _accumulator(ctx.rows_dtype)
            row_TK = None if row_S is None else row_S.view(T, K)
            parts = []
            for part in _by_chunks(T, K * H, grad_TH.device):
                if row_TK is None:
                    rows = rows_SH.view(T, K, H)[part]
                else:
                    rows = rows_SH.index_select(0, row_TK[part].reshape(-1)).view(-1, K, H)
                dots = (rows.to(acc) * grad_TH[part].unsqueeze(1)).sum(-1)
                parts.append(_rounded(dots.masked_fill_(no_expert_TK[part], 0), weights_TK.dtype))
            grad_weights = parts[0] if len(parts) == 1 else torch.cat(parts)
        return grad_rows, grad_weights, None, None, None, None


def _take_bias(bias_EN: Tensor, expert_S: Tensor) -> Tensor:
    return bias_EN.index_select(0, expert_S.clamp(max=bias_EN.shape[0] - 1))


class _ExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, bias_EN, expert_S, no_expert_S):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(expert_S, no_expert_S)
        ctx.num_experts, ctx.dtype = bias_EN.shape[0], bias_EN.dtype
        return _take_bias(bias_EN, expert_S)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SN):  # type: ignore[no-untyped-def]
        # A product with a one-hot matrix: no atomics, fp32 sums, and no pass per expert.
        expert_S, no_expert_S = ctx.saved_tensors
        acc = _accumulator(grad_SN.dtype)
        experts = torch.arange(ctx.num_experts, device=expert_S.device)
        grad = torch.zeros(ctx.num_experts, grad_SN.shape[1], dtype=acc, device=grad_SN.device)
        for part in _by_chunks(expert_S.shape[0], max(ctx.num_experts, grad_SN.shape[1]), grad_SN.device):
            rows = grad_SN[part].masked_fill(no_expert_S[part, None], 0).to(acc)
            grad = grad + (experts[:, None] == expert_S[None, part]).to(acc) @ rows
        return grad.to(ctx.dtype), None, None
