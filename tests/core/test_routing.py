"""Order of pairs, and back."""

import pytest
import torch

from moetor import InvalidInput
from moetor.core import routing
from moetor.core.routing import combine, expert_bias, gather_tokens, group_by_expert, keep_pair_order

IDS = torch.tensor([[3, 0], [-1, 3], [1, 1], [4, 99]])


@pytest.mark.parametrize("order_of", [group_by_expert, keep_pair_order])
def test_every_pair_has_one_row_and_its_own_expert(order_of) -> None:
    order = order_of(IDS, 4)
    pair_S = torch.arange(8) if order.pair_S is None else order.pair_S
    assert sorted(pair_S.tolist()) == list(range(8))
    flat = IDS.flatten()[pair_S]
    no_expert_S = order.no_expert_S().tolist()
    assert no_expert_S == [not 0 <= i < 4 for i in flat.tolist()]
    for expert, wanted, none in zip(order.expert_S.tolist(), flat.tolist(), no_expert_S, strict=True):
        assert none or expert == wanted
    if order.row_S is not None:
        assert order.row_S[pair_S].tolist() == list(range(8))


def test_grouping_is_stable_and_ends_where_experts_end() -> None:
    order = group_by_expert(IDS, 4)
    assert order.pair_S is not None
    assert order.ends_E is not None
    assert order.pair_S.tolist()[:5] == [1, 4, 5, 0, 3]
    assert order.ends_E.tolist() == [1, 3, 3, 5]
    assert order.ends_E.dtype == torch.int32


def test_ids_must_have_two_dimensions() -> None:
    with pytest.raises(InvalidInput, match=r"must have shape \(T, K\), got \(19,\)"):
        group_by_expert(torch.zeros(19, dtype=torch.int64), 4)


@pytest.mark.parametrize("order_of", [group_by_expert, keep_pair_order])
def test_chunks_change_nothing(order_of, monkeypatch) -> None:
    """In bits: a chunk is a slice of the tokens, and no sum crosses tokens."""
    T, K, E, H = 29, 3, 5, 7

    def both() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(-1, E + 1, (T, K), generator=generator)
        x = torch.randn(T, H, generator=generator).requires_grad_()
        weights = torch.rand(T, K, generator=generator).requires_grad_()
        bias = torch.randn(E, H, generator=generator).requires_grad_()
        order = order_of(ids, E)
        rows = gather_tokens(x, order) + expert_bias(bias, order)
        result = combine(rows, weights, order, torch.float32)
        return [result, *torch.autograd.grad(result.sin().sum(), (x, weights, bias))]

    whole = both()
    monkeypatch.setattr(routing, "_CHUNK_CPU", 4 * K * H)
    for a, b in zip(whole, both(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert torch.equal(whole[0], both()[0])


def test_gradcheck_in_float64() -> None:
    order = group_by_expert(IDS, 4)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def layer(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return combine(gather_tokens(x, order).sin() + expert_bias(bias, order), weights, order, torch.float64)

    assert torch.autograd.gradcheck(layer, (x, weights, bias))


@pytest.mark.parametrize("routing_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order_of", [group_by_expert, keep_pair_order])
def test_sum_over_slots_is_fp32_and_rounded_once(order_of, routing_dtype: torch.dtype) -> None:
    rows = torch.tensor([[256.0], [1.0], [-256.0]], dtype=torch.bfloat16)  # 257 is no bfloat16
    order = order_of(torch.tensor([[0, 0, 0]]), 1)
    assert combine(rows, torch.ones(1, 3, dtype=routing_dtype), order, torch.bfloat16).item() == 1.0

    rows, weights = torch.randn(40 * 17, 33).bfloat16(), torch.rand(40, 17).to(routing_dtype)
    order = order_of(torch.zeros(40, 17, dtype=torch.int64), 1)
    terms = rows.view(40, 17, 33) * weights[..., None]
    exact = terms.double().sum(1)
    result = combine(rows, weights, order, torch.bfloat16)
    # half a unit in the last of 8 places, and what fp32 does to 17 terms
    assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 + terms.double().abs().sum(1) * 2**-20).all()


@pytest.mark.parametrize("order_of", [group_by_expert, keep_pair_order])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_no_other_id_is_taken_for_an_expert(order_of, dtype: torch.dtype) -> None:
    bounds = torch.iinfo(dtype)
    order = order_of(torch.tensor([[bounds.min, bounds.min + 1, -2, -1, 0, 1, 2, 3, bounds.max]], dtype=dtype), 2)
    assert order.no_expert_TK.tolist() == [[True, True, True, True, False, False, True, True, True]]
    if order.ends_E is not None:
        assert order.ends_E.tolist() == [1, 2]
        assert order.pair_S[:2].tolist() == [4, 5]
