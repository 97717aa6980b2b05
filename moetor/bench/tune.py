"""Which backend is fastest at which T: measured until the budget is spent, where it matters first.

Letters: T tokens.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

from ..backends.timings import Entry, Kind, device_name, versions
from ..core.interface import ExpertsInterface
from .cases import Cell
from .measure import FEWEST_SAMPLES
from .peers import candidates
from .report import CellResult, Report, Row
from .run import Settings, run

# Each half of the gaps that those before it leave; a budget that ends early leaves a coarse table, and no hole.
FIRST = (1, 16, 256, 4096, 4, 64, 1024, 2, 8, 32, 128, 512, 2048)
# Two backends whose crossing is known to this factor of T differ little between.
NEAR = 1.25
HOPELESS = 8.0


def tune(cell: Cell, settings: Settings, report: Report) -> Iterator[CellResult]:
    """Measure the cell's layer at one T after another, and yield each; the report has them too.

    After a fixed grid, T between two neighbours that different backends win, until every crossing is known to 25 % or
    the settings' budget is spent. A T that would overrun it, by what smaller ones took, is left out.

    Args:
        cell: whose T does not matter.
    """
    names = [name for name in ExpertsInterface.names() if ExpertsInterface[name].choose is None]
    start, budget_s = settings.clock(), math.inf if settings.budget_s is None else settings.budget_s
    took_s: dict[int, float] = {}
    skipped: set[int] = set()
    while (T := next_tokens(_measured(report, cell), settings.modes, skipped)) is not None:
        begin = settings.clock()
        left_s = budget_s - (begin - start)
        if took_s and left_s <= 0:
            return
        if took_s and _predicted_s(_measured(report, cell), took_s, T) > left_s:
            skipped.add(T)
            continue
        chosen = candidates(",".join(_in_the_running(names, _measured(report, cell), T)))
        yield from run([replace(cell, tokens=T)], chosen, replace(settings, budget_s=None), report)
        took_s[T] = settings.clock() - begin


def _predicted_s(measured: Sequence[CellResult], took_s: dict[int, float], T: int) -> float:
    """What a cell may take, by the largest one below it: its calls grow with T, the rest does not."""
    below = [cell for cell in measured if cell.tokens in took_s and cell.tokens < T]
    if not below:
        return 0.0
    near = max(below, key=lambda cell: cell.tokens)
    # checked, timed once to see how long it takes, and then the fewest samples that make a median
    passes = near.draws * (FEWEST_SAMPLES + 2)
    calls_s = passes * sum(row.best.median_us for row in near.rows if row.best) / 1e6
    return took_s[near.tokens] + calls_s * (T / near.tokens - 1)


def _in_the_running(names: list[str], measured: Sequence[CellResult], T: int) -> list[str]:
    """Without those that were hopeless at the nearest T; nobody waits for them twice."""
    if not measured:
        return names
    near = min(measured, key=lambda cell: abs(math.log(cell.tokens / T)))
    best = min((row.best.median_us for row in near.rows if row.best), default=math.inf)
    # a refusal may be of that T alone
    kept = {row.candidate for row in near.rows if row.best is None or row.best.median_us <= HOPELESS * best}
    return [name for name in names if name in kept]


def next_tokens(measured: Sequence[CellResult], modes: Sequence[str], skipped: Collection[int] = ()) -> int | None:
    """The next T to measure; None: all that matters is known.

    >>> next_tokens([], ["call"]), next_tokens([], ["call"], skipped=[1])
    (1, 16)
    """
    winners = {cell.tokens: [_winner(cell, mode) for mode in modes] for cell in measured}
    for T in FIRST:
        if T not in winners and T not in skipped:
            return T
    known = sorted(winners)
    gaps = [(high / low, low, high) for low, high in pairwise(known)]
    for ratio, low, high in sorted(gaps, reverse=True):
        between = round(math.sqrt(low * high))
        if ratio > NEAR and winners[low] != winners[high] and low < between < high and between not in skipped:
            return between
    return None


def entries(report: Report, cell: Cell, settings: Settings) -> list[Entry]:
    """What was measured of the cell's layer, as the table keeps it; one entry a mode."""
    cells = sorted(_measured(report, cell), key=lambda c: c.tokens)
    shape = cell.shape
    kind = Kind(
        device_name(settings.device),
        str(cell.dtype).removeprefix("torch."),
        cell.format,
        (shape.experts, shape.top_k, shape.hidden, shape.intermediate),
        # quantised weights always come back (out, in)
        shape.transposed and cell.format == "dense",
        cell.training,
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found = []
    for mode in settings.modes:
        timed = [c for c in cells if any(mode in row.times for row in c.rows)]
        if timed:
            names = dict.fromkeys(row.candidate for c in timed for row in c.rows if mode in row.times)
            times = {name: [_time(c, name, mode) for c in timed] for name in names}
            one = replace(kind, graph=mode == "graph")
            found.append(Entry(one, versions(), date, [c.tokens for c in timed], times))
    return found


def crossings(entry: Entry) -> list[tuple[int, int, str]]:
    """(first T, last T, fastest backend) over the measured range, by the entry's own expectation.

    >>> kind = Kind("a GPU", "bfloat16", "dense", (8, 2, 64, 32))
    >>> crossings(Entry(kind, {}, "", [1, 4], {"a": [1.0, 8.0], "b": [3.0, 4.0]}))
    [(1, 2, 'a'), (3, 4, 'b')]
    """
    runs: list[tuple[int, int, str]] = []
    for T in _steps(entry.tokens[0], entry.tokens[-1], entry.tokens):
        best = next(iter(entry.expected_us(T)), "none")
        if runs and runs[-1][2] == best:
            runs[-1] = (runs[-1][0], T, best)
        else:
            runs.append((runs[-1][1] + 1 if runs else T, T, best))
    return runs


def _steps(low: int, high: int, also: Sequence[int]) -> list[int]:
    """Every T up to 64, then by 2 %: where a line crosses another need not be known closer."""
    steps, T = set(also), low
    while high >= T:
        steps.add(T)
        T = max(T + 1, int(T * 1.02) if T > 64 else 0)
    return sorted(steps)


def _measured(report: Report, cell: Cell) -> list[CellResult]:
    """The report's cells of this one's layer."""
    group = CellResult.of(cell).group
    return [result for result in report.cells if result.group == group]


def _winner(cell: CellResult, mode: str) -> str | None:
    row = cell.fastest(mode, peer=False)
    return row.candidate if row else None


def _time(cell: CellResult, name: str, mode: str) -> float | None:
    row: Row | None = next((row for row in cell.rows if row.candidate == name), None)
    return row.times[mode].median_us if row and mode in row.times else None
