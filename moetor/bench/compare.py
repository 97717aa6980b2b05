"""Two reports side by side: which times changed by more than noise."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from .measure import Timing
from .page import label
from .report import CellResult, Report, Row

# Of the same code in another process on a quiet machine, medians differ by a few percent.
LEAST_CHANGE = 0.10


@dataclass(frozen=True, slots=True)
class Change:
    """One candidate in one cell and mode, in both reports.

    Attributes:
        ratio: time after over time before, with the machine's own change taken out.
        machine: that change: the median ratio of the cell's peers, which are code that did not
            change; 1 where there are none.
        noise: relative; the quartiles of both times reach this far from their medians.
    """

    cell: str
    candidate: str
    mode: str
    before_us: float
    after_us: float
    ratio: float
    machine: float
    noise: float

    @property
    def beyond_noise(self) -> bool:
        """Whether it is more than 10 %, and more than both times' quartiles can explain."""
        slower = max(self.ratio, 1 / self.ratio) - 1
        return slower > max(LEAST_CHANGE, self.noise)

    def __str__(self) -> str:
        how = "slower" if self.ratio > 1 else "faster"
        text = f"{self.cell} {self.candidate} {self.mode}: {self.before_us:.1f} -> {self.after_us:.1f} µs"
        text += f", {abs(self.ratio - 1):.0%} {how} (noise {self.noise:.0%}"
        return text + (f", machine {self.machine:.2f} ×)" if self.machine != 1 else ")")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from one report to another.

    Attributes:
        changes: every time that both have, ours and peers'.
        notes: what makes the two hard to compare, and cells and statuses that are in one only.
    """

    changes: list[Change]
    notes: list[str]

    @property
    def beyond_noise(self) -> list[Change]:
        return [change for change in self.changes if change.beyond_noise]


def compare(before: Report, after: Report) -> Comparison:
    """Compare what both hold: same cell, candidate and mode."""
    notes = [
        f"{name}: {before.machine.get(name)} -> {after.machine.get(name)}"
        for name in dict.fromkeys([*before.machine, *after.machine])
        if before.machine.get(name) != after.machine.get(name)
    ]
    same_peers = not notes
    olds, news = ({_key(cell): cell for cell in report.cells} for report in (before, after))
    changes: list[Change] = []
    for key, new in news.items():
        if key not in olds:
            notes.append(f"{label(new)}: only in the second")
            continue
        changes += _cell(olds[key], new, same_peers)
        notes += _statuses(olds[key], new)
    notes += [f"{label(old)}: only in the first" for key, old in olds.items() if key not in news]
    return Comparison(changes, notes)


def _key(cell: CellResult) -> tuple[object, ...]:
    return cell.shape, cell.tokens, cell.dtype, cell.format, cell.routing, cell.training


def _pairs(old: CellResult, new: CellResult) -> Iterator[tuple[Row, Row]]:
    rows = {row.candidate: row for row in old.rows}
    return ((rows[row.candidate], row) for row in new.rows if row.candidate in rows)


def _cell(old: CellResult, new: CellResult, same_peers: bool) -> Iterator[Change]:
    for mode in new.modes:
        both = [(a, b) for a, b in _pairs(old, new) if mode in a.times and mode in b.times]
        peers = [b.times[mode].median_us / a.times[mode].median_us for a, b in both if b.peer]
        machine = statistics.median(peers) if peers and same_peers else 1.0
        for a, b in both:
            first, second = a.times[mode], b.times[mode]
            own = 1.0 if b.peer else machine
            ratio = second.median_us / first.median_us / own
            noise = _spread(first) + _spread(second)
            yield Change(label(new), b.candidate, mode, first.median_us, second.median_us, ratio, own, noise)


def _statuses(old: CellResult, new: CellResult) -> Iterator[str]:
    for a, b in _pairs(old, new):
        if a.status != b.status:
            yield f"{label(new)} {b.candidate}: {a.status} -> {b.status}" + (f" ({b.reason})" if b.reason else "")


def _spread(timing: Timing) -> float:
    """How far the farther quartile lies from the median."""
    return max(timing.q3_us - timing.median_us, timing.median_us - timing.q1_us) / timing.median_us
