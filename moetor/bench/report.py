"""What a run found, as data, and as JSON that reads back to the same.

The JSON is one object, `Report`, with the attributes below as keys:

    schema      1
    command     the exact command line
    commit      of moetor, with "+changes" when the tree differed
    date        ISO 8601, UTC
    machine     {"device", "driver", "python", "torch", "triton", "transformers", …}: text or null
    roofs       {"bytes_per_s", "flops_per_s", "dtype"}, measured in this run
    cells       a list of `CellResult`
      shape     {"name", "model", "experts", "top_k", "hidden", "intermediate", "gate", "bias",
                 "interleaved", "transposed", "fp32_routing"}
      tokens, dtype, routing, seed, draws, layers, hit, flops, weight_bytes, activation_bytes, floor_us
      rows      a list of `Row`: {"candidate", "peer", "status", "reason", "error", "first_call_s",
                 "extra_bytes", "call", "graph", "call_reason", "graph_reason"}
        call, graph   {"median_us", "q1_us", "q3_us", "samples"} or null, with the reason beside it
    left_out    cells that were not run, as text with the reason

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ..core.errors import InvalidInput
from .cases import Cell
from .measure import Timing
from .roofs import Roofs
from .shapes import Shape

SCHEMA = 1


@dataclass(slots=True)
class Row:
    """One candidate in one cell.

    Attributes:
        status: "ok", "refused", "wrong", "failed", "out of memory" or "timed out"; only "ok" has times.
        error: largest relative error over the draws, against float64; None also where there was NaN.
        first_call_s: of the first call, compilation included.
        extra_bytes: peak memory of one call beyond its inputs, result included.
        call, graph: times; None with the reason in call_reason, graph_reason.
    """

    candidate: str
    peer: bool
    status: str = "ok"
    reason: str | None = None
    error: float | None = None
    first_call_s: float | None = None
    extra_bytes: int | None = None
    call: Timing | None = None
    graph: Timing | None = None
    call_reason: str | None = None
    graph_reason: str | None = None

    @property
    def best(self) -> Timing | None:
        """The graph's time where there is one, else the call's."""
        return self.graph or self.call


@dataclass(slots=True)
class CellResult:
    """All candidates in one cell, with the cost of its mean draw.

    Attributes:
        draws, layers: calls that a pass holds, and layers of weights that they go round.
        hit: experts with at least one token, mean of the draws.
        floor_us: the larger of bytes and FLOPs over the run's roofs.
    """

    shape: Shape
    tokens: int
    dtype: str
    routing: str
    seed: int
    draws: int = 0
    layers: int = 0
    hit: float = 0.0
    flops: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    floor_us: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, cell: Cell) -> Self:
        return cls(cell.shape, cell.tokens, str(cell.dtype).removeprefix("torch."), cell.routing, cell.seed)

    def gb_per_s(self, timing: Timing) -> float:
        """Bytes that have to move, over the time."""
        return (self.weight_bytes + self.activation_bytes) / timing.median_us / 1e3

    def tflop_per_s(self, timing: Timing) -> float:
        """Useful operations, 6·T·K·H·I, over the time."""
        return self.flops / timing.median_us / 1e6

    def times_floor(self, timing: Timing) -> float:
        return timing.median_us / self.floor_us

    def fastest(self, mode: str, peer: bool) -> Row | None:
        """The fastest of the peers, or of ours."""
        rows = [row for row in self.rows if row.peer == peer and getattr(row, mode)]
        return min(rows, key=lambda row: getattr(row, mode).median_us, default=None)


@dataclass(slots=True)
class Report:
    """A run; see above."""

    command: str
    commit: str
    date: str
    machine: dict[str, str | None]
    roofs: Roofs
    cells: list[CellResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Write JSON; an interruption leaves the file that was there before."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            InvalidInput: another schema, or no report.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise InvalidInput(f"{path} must be a report of schema {SCHEMA}, got {data['schema']}")
            return cls(**{**data, "roofs": Roofs(**data["roofs"]), "cells": [_cell(cell) for cell in data["cells"]]})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} must be a report of moetor's bench, got something else: {error!r}") from error


def _cell(data: dict[str, Any]) -> CellResult:
    return CellResult(**{**data, "shape": Shape(**data["shape"]), "rows": [_row(row) for row in data["rows"]]})


def _row(data: dict[str, Any]) -> Row:
    return Row(**{**data, **{mode: Timing(**data[mode]) for mode in ("call", "graph") if data[mode]}})
