"""What a run of a whole model found: as data, as JSON with these attributes as keys, and as a page of Markdown."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .measure import Timing

SCHEMA = "whole model 1"


@dataclass(slots=True)
class ModelRow:
    """One implementation and mode in one cell; `time` is of a forward (prefill) or of a token (decode)."""

    implementation: str
    mode: str
    status: str = "ok"
    reason: str | None = None
    error: float | None = None
    time: Timing | None = None


@dataclass(slots=True)
class ModelCell:
    """A phase of sequences of one length.

    Attributes:
        length: tokens of the prompt, of each sequence.
    """

    phase: str
    batch: int
    length: int
    rows: list[ModelRow] = field(default_factory=list)


@dataclass(slots=True)
class ModelReport:
    """What a run found; its JSON has these attributes as keys, times in µs."""

    command: str
    commit: str
    date: str
    machine: dict[str, str | None]
    model: str
    dtype: str
    layers: int
    parameters: int
    cells: list[ModelCell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    schema: str = SCHEMA

    def save(self, path: Path) -> None:
        """Write JSON; an interruption leaves the file that was there before."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def model_page(report: ModelReport) -> str:
    """Markdown: one line a cell, one column an implementation and mode, ms with quartiles."""
    lines = [f"# A whole model: {report.model}", ""]
    facts = {"date": report.date, "commit": report.commit, "command": f"`{report.command}`", **report.machine}
    lines += [f"- {name}: {value}" for name, value in facts.items() if value]
    lines += [
        f"- random weights, {report.layers} layers, {report.parameters / 1e9:.2f} billion parameters, {report.dtype}"
    ]
    lines += ["", "ms, median and quartiles: prefill of one forward, decode of one token a sequence in a static cache,"]
    lines += ["launched from Python. Logits were within tolerance of transformers' eager first.", ""]
    columns = list(dict.fromkeys((row.implementation, row.mode) for cell in report.cells for row in cell.rows))
    titles = [name if mode == "call" else f"{name}, {mode}" for name, mode in columns]
    lines += [f"| phase | batch | length | {' | '.join(titles)} |", "|---|--:|--:|" + "--:|" * len(columns)]
    for cell in report.cells:
        rows = {(row.implementation, row.mode): row for row in cell.rows}
        words = [_words(rows.get(column)) for column in columns]
        lines.append(f"| {cell.phase} | {cell.batch} | {cell.length} | {' | '.join(words)} |")
    reasons = dict.fromkeys(f"- **{row.implementation}**, {row.mode}: {row.status}, {row.reason}"
                            for cell in report.cells for row in cell.rows if row.reason)  # fmt: skip
    if reasons:
        lines += ["", "## Why there is no time", "", *reasons]
    if report.left_out:
        lines += ["", "## Not run", "", *(f"- {text}" for text in report.left_out)]
    return "\n".join(lines) + "\n"


def _words(row: ModelRow | None) -> str:
    if row is None or row.time is None:
        return "–" if row is None else row.status
    median, q1, q3 = (us / 1e3 for us in (row.time.median_us, row.time.q1_us, row.time.q3_us))
    return f"{median:.2f} ({q1:.2f}–{q3:.2f})"
