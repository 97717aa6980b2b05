"""Rows of consecutive experts, as many as stay in the cache from one product to the next."""

from collections.abc import Iterator
from dataclasses import dataclass

# With 64 rows what lies between the products of a 2048 → 1408 layer is 1 MB, a core's L2; and
# experts with a row or two share what is done once a block.
ROWS = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Rows start … stop of the sorted pairs.

    Attributes:
        experts: (expert, first row, one past its last row), counted from `start`.
    """

    start: int
    stop: int
    experts: list[tuple[int, int, int]]


def blocks(ends: list[int]) -> Iterator[Block]:
    """All rows that have an expert, from one past the last row of each expert.

    An expert's rows are never divided, since its matrices would be read twice.

    >>> [(block.start, block.stop, block.experts) for block in blocks([2, 2, 3])]
    [(0, 3, [(0, 0, 2), (2, 2, 3)])]
    """
    start = row = 0
    experts: list[tuple[int, int, int]] = []
    for expert, end in enumerate(ends):
        if end > row:
            if experts and end - start > ROWS:
                yield Block(start, row, experts)
                start, experts = row, []
            experts.append((expert, row - start, end - start))
            row = end
    if experts:
        yield Block(start, row, experts)
