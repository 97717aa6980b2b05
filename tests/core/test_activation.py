"""Gates as data."""

import pytest
import torch

from moetor import Activation, InvalidInput
from moetor.testing.cases import GATES


@pytest.mark.parametrize("name", GATES)
def test_half_precision_rounds_the_result_and_not_the_steps(name: str) -> None:
    gate, up = torch.randn(2, 64, 32, dtype=torch.bfloat16)
    exact = GATES[name].apply(gate.double(), up.double())
    rounded = GATES[name].apply(gate, up).double()
    assert ((rounded - exact).norm() / exact.norm()).item() < 4e-3  # two roundings of 2^-9 each


def test_clamps_bound_gate_above_and_up_on_both_sides() -> None:
    activation = Activation("identity", limit=1.0)
    gate, up = torch.tensor([-9.0, 9.0, 0.5]), torch.tensor([-9.0, 9.0, 0.5])
    assert activation.apply(gate, up).tolist() == [9.0, 1.0, 0.25]
    after = Activation("relu2", limit=1.0, limit_after=True)
    assert after.apply(gate, up).tolist() == [0.0, 1.0, 0.125]


def test_custom_function_is_not_data() -> None:
    assert Activation.custom(torch.sin).fn is torch.sin
    with pytest.raises(InvalidInput, match="only a custom activation has a function"):
        Activation("silu", fn=torch.sin)


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="must be one of silu, gelu"):
        Activation("swish2")


@pytest.mark.parametrize("numbers", [{"limit": -1.0}, {"gate_softcap": 0.0}, {"up_softcap": 0.0}])
def test_bounds_must_be_positive(numbers: dict) -> None:
    with pytest.raises(InvalidInput, match="must be positive"):
        Activation("silu", **numbers)


def test_numbers_of_another_kind_are_refused() -> None:
    with pytest.raises(InvalidInput, match="belong to kind 'silu'"):
        Activation("relu", alpha=1.7)
