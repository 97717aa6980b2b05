"""What a run found, as data, and as JSON that reads back to the same.

The JSON is one object, `Report`, with the attributes below as keys:

    schema      2
    command     the exact command line
    commit      of moetor, with "+changes" when the tree differed
    date        ISO 8601, UTC
    machine     {"device", "driver", "python", "torch", "triton", "transformers", …}: text or null
    roofs       {"bytes_per_s", "flops_per_s", "dtype"}, measured in this run
    cells       a list of `CellResult`
      shape     {"name", "model", "experts", "top_k", "hidden", "intermediate", "gate", "bias",
                 "interleaved", "transposed", "fp32_routing"}
      tokens, dtype, format, routing, training, seed, draws, layers, hit, flops, weight_bytes,
      activation_bytes, floor_us
      rows      a list of `Row`: {"candidate", "peer", "status", "reason", "error", "first_call_s",
                 "extra_bytes", "times", "no_time"}
        times   mode to {"median_us", "q1_us", "q3_us", "samples"}
        no_time mode to the reason why it has no time
    left_out    cells that were not run, as text with the reason

`schema.json` beside this file says the same as a JSON Schema.

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

SCHEMA = 2


@dataclass(slots=True)
class Row:
    """One candidate in one cell.

    Attributes:
        status: "ok", "refused", "wrong", "failed", "out of memory" or "timed out"; only "ok" has times.
        error: largest relative error over the draws, against float64; None also where there was NaN.
        first_call_s: of the first call, compilation included.
        extra_bytes: peak memory of one call beyond its inputs, result included.
        times: by mode, see `samplers.MODES`.
        no_time: by mode, why there is none.
    """

    candidate: str
    peer: bool
    status: str = "ok"
    reason: str | None = None
    error: float | None = None
    first_call_s: float | None = None
    extra_bytes: int | None = None
    times: dict[str, Timing] = field(default_factory=dict)
    no_time: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Timing | None:
        """The graph's time where there is one, else the first there is."""
        return self.times.get("graph") or next(iter(self.times.values()), None)


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
    format: str
    routing: str
    training: bool
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
        dtype = str(cell.dtype).removeprefix("torch.")
        return cls(cell.shape, cell.tokens, dtype, cell.format, cell.routing, cell.training, cell.seed)

    @property
    def group(self) -> str:
        """What a plot over T keeps fixed."""
        words = [self.shape.name, self.dtype, self.routing]
        words += [self.format] * (self.format != "dense") + ["training"] * self.training
        return " ".join(words)

    @property
    def modes(self) -> list[str]:
        """Those that somebody has a time in."""
        return list(dict.fromkeys(mode for row in self.rows for mode in row.times))

    def gb_per_s(self, timing: Timing) -> float:
        """Bytes that have to move, over the time."""
        return (self.weight_bytes + self.activation_bytes) / timing.median_us / 1e3

    def tflop_per_s(self, timing: Timing) -> float:
        """Useful operations, 6·T·K·H·I and in training three times that, over the time."""
        return self.flops / timing.median_us / 1e6

    def times_floor(self, timing: Timing) -> float:
        return timing.median_us / self.floor_us

    def fastest(self, mode: str, peer: bool) -> Row | None:
        """The fastest of the peers, or of ours."""
        rows = [row for row in self.rows if row.peer == peer and mode in row.times]
        return min(rows, key=lambda row: row.times[mode].median_us, default=None)


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

    @property
    def modes(self) -> list[str]:
        """Those that some cell has a time in."""
        return list(dict.fromkeys(mode for cell in self.cells for mode in cell.modes))

    def groups(self) -> dict[str, list[CellResult]]:
        """Cells that differ in T alone, in the order of T."""
        groups: dict[str, list[CellResult]] = {}
        for cell in self.cells:
            groups.setdefault(cell.group, []).append(cell)
        return {name: sorted(cells, key=lambda cell: cell.tokens) for name, cells in groups.items()}

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
    return Row(**{**data, "times": {mode: Timing(**timing) for mode, timing in data["times"].items()}})
