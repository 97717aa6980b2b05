"""A layer as the loops over experts see it, from the flat arguments of an operator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from torch import Tensor

from ...core.activation import Activation

Item = TypeVar("Item")

# One matrix (N, K) an expert, by `matrices[expert]`: a stack, or a list of tensors of their own.
Matrices = Tensor | list[Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """What there is of one layer.

    Attributes:
        ups: the first product: one, or gate and up apart.
        up_biases: (E, N) or None for each of them.
        down, down_bias: the second product.
    """

    ups: list[Matrices]
    up_biases: Sequence[Tensor | None]
    down: Matrices
    down_bias: Tensor | None
    activation: Activation
    gated: bool
    interleaved: bool

    @classmethod
    def of(
        cls, up: list[Tensor], up_bias: Sequence[Tensor | None], down: list[Tensor], down_bias: Tensor | None,
        gated: bool, interleaved: bool, kind: str, alpha: float, limit: float | None, limit_after: bool,
        up_offset: float, gate_softcap: float | None, up_softcap: float | None,
    ) -> Self:  # fmt: skip
        activation = Activation(kind, alpha, limit, limit_after, up_offset, gate_softcap, up_softcap)
        (second,) = matrices(down, 1)
        return cls(matrices(up, len(up_bias)), up_bias, second, down_bias, activation, gated, interleaved)

    @property
    def num_experts(self) -> int:
        return len(self.down)


def matrices(tensors: list[Tensor], count: int) -> list[Matrices]:
    """`count` of them from their tensors in a row: stacks (E, N, K), or E matrices (N, K) each."""
    if stacked(tensors):
        return list(tensors)
    return list(chunks(tensors, count))


def stacked(tensors: list[Tensor]) -> bool:
    """Whether these are stacks."""
    return tensors[0].dim() == 3


def chunks(items: list[Item], count: int) -> list[list[Item]]:
    """`count` lists of equal length."""
    size = len(items) // count
    return [items[i * size : (i + 1) * size] for i in range(count)]
