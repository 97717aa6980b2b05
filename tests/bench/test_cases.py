"""Shapes, draws, the reference and the floors."""

import pytest
import torch

from moetor.bench.cases import ROUTINGS, Cell, Draw, make_draws, make_ids
from moetor.bench.reference import reference
from moetor.bench.roofs import cost_of, measure_roofs
from moetor.bench.shapes import SHAPES, Shape, parse_shapes
from moetor.core.errors import InvalidInput, UnknownBackend
from moetor.core.weights import ExpertWeights, Weight
from moetor.testing import Case, Inputs, oracle, relative_error

CPU = torch.device("cpu")


def test_there_are_a_dozen_real_models() -> None:
    assert len(SHAPES) >= 12
    assert len({shape.model for shape in SHAPES.values()}) == len(SHAPES)


@pytest.mark.parametrize("text", ["8,2,256", "8,9,256,512", "", "Q16"])
def test_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises((InvalidInput, UnknownBackend)):
        parse_shapes(text)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_of_a_token_are_distinct(routing: str) -> None:
    cell = Cell(Shape("tiny", "none", 16, 4, 8, 8), 500, torch.float32, routing)
    ids = make_ids(cell, torch.Generator().manual_seed(0))
    assert ids.shape == (500, 4)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=16)
    largest = counts.max().item() / 500
    assert {"uniform": largest < 0.4, "zipf": 0.5 < largest < 1, "one_expert": largest == 1}[routing]


def test_draws_differ_and_repeat_with_their_seed() -> None:
    cell = Cell(Shape("tiny", "none", 8, 2, 16, 8), 3, torch.bfloat16)
    first, second = make_draws(cell, CPU)
    again, _ = make_draws(cell, CPU)
    assert first.weights is not second.weights
    assert not torch.equal(first.hidden_states, second.hidden_states)
    assert torch.equal(first.hidden_states, again.hidden_states)
    assert torch.equal(first.top_k_index, again.top_k_index)
    assert first.top_k_weights.dtype == torch.bfloat16


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_reference_is_the_oracle(gpt_oss: bool) -> None:
    more = {"gate": "gpt_oss", "bias": True, "interleaved": True, "transposed": True} if gpt_oss else {}
    cell = Cell(Shape("tiny", "none", 5, 2, 32, 16, **more), 7, torch.float32)  # type: ignore[arg-type]
    draw = make_draws(cell, CPU)[0]
    inputs = Inputs(Case(), draw.weights, draw.hidden_states, draw.top_k_index, draw.top_k_weights)
    expected, _ = oracle(inputs, draw.hidden_states)
    assert relative_error(reference(draw)[0], expected) < 1e-14


def test_reference_gradients_are_the_oracle() -> None:
    cell = Cell(Shape("tiny", "none", 5, 2, 32, 16, bias=True), 7, torch.float32, training=True)
    draw = make_draws(cell, CPU)[0]
    assert draw.upstream is not None
    inputs = Inputs(Case(), draw.weights, draw.hidden_states, draw.top_k_index, draw.top_k_weights)
    result, gradients = oracle(inputs, draw.upstream)
    got = reference(draw, gradients=True)
    assert len(got) == 1 + len(draw.leaves()) == 7
    for value, expected in zip(got, [result, *gradients.values()], strict=True):
        assert relative_error(value, expected) < 1e-14


def test_floor_is_bytes_of_the_experts_hit() -> None:
    # 2 tokens on experts 0, 1 and 0, 2: three of four hit; H = 4, I = 2, float32
    weights = ExpertWeights(Weight(torch.ones(4, 4, 4)), Weight(torch.ones(4, 4, 2)))
    cell = Cell(Shape("hand", "none", 4, 2, 4, 2), 2, torch.float32)
    draw = Draw(cell, weights, torch.ones(2, 4), torch.tensor([[0, 1], [0, 2]]), torch.ones(2, 2))
    cost, hit = cost_of([draw])
    assert hit == 3
    assert cost.weight_bytes == 3 * (4 * 4 + 4 * 2) * 4
    assert cost.activation_bytes == (2 * 2 * 4 + 2 * 4 * 2) * 4  # x and result, then the rows in between twice
    assert cost.flops == 6 * 2 * 2 * 4 * 2
    assert cost.floor_us(bytes_per_s=416, flops_per_s=1e9) == pytest.approx(1e6)  # 288 + 128 bytes
    assert cost.floor_us(bytes_per_s=1e9, flops_per_s=192) == pytest.approx(1e6)


def test_roofs_are_positive() -> None:
    roofs = measure_roofs(CPU, torch.float32, repeats=2)
    assert roofs.bytes_per_s > 1e8
    assert roofs.flops_per_s > 1e8
