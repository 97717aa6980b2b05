"""Where `tune` looks, when it stops, and what it keeps."""

import time
from dataclasses import replace

import pytest
import torch

from moetor import Backend, ExpertsInterface
from moetor.backends.timings import Entry
from moetor.bench.cases import Cell
from moetor.bench.measure import Timing
from moetor.bench.report import CellResult, Report, Row
from moetor.bench.roofs import Roofs
from moetor.bench.run import Settings
from moetor.bench.shapes import Shape
from moetor.bench.tune import FIRST, _in_the_running, crossings, entries, next_tokens, tune

CELL = Cell(Shape("tiny", "none", 4, 2, 32, 16), 1, torch.float32)


def make_report() -> Report:
    return Report("command", "commit", "date", {"device": "cpu", "torch": "2"}, Roofs(1e10, 1e11, "float32"))


def measured(T: int, **times_us: float | None) -> CellResult:
    rows = [
        Row(name, False, "refused" if us is None else "ok", times={} if us is None else {"call": Timing(us, us, us, 5)})
        for name, us in times_us.items()
    ]
    return replace(CellResult.of(replace(CELL, tokens=T)), rows=rows)


def test_after_the_grid_crossings_are_halved() -> None:
    def us(T: int) -> CellResult:
        return measured(T, a=10.0 + T, b=50.0)  # cross at 40

    cells: list[CellResult] = []
    while (T := next_tokens(cells, ["call"])) is not None:
        assert T not in [cell.tokens for cell in cells]
        cells.append(us(T))
    assert [cell.tokens for cell in cells[: len(FIRST)]] == list(FIRST)
    # 32 wins for a and 64 for b: only in between more is measured
    more = sorted(cell.tokens for cell in cells[len(FIRST) :])
    assert more
    assert 32 < more[0] <= more[-1] < 64
    winners = {cell.tokens: cell.fastest("call", peer=False).candidate for cell in cells}  # type: ignore[union-attr]
    low = max(T for T, name in winners.items() if name == "a")
    high = min(T for T, name in winners.items() if name == "b")
    assert high / low <= 1.25
    (first, second) = crossings(entries(_report(cells), CELL, Settings(torch.device("cpu")))[0])
    assert (first[2], second[2]) == ("a", "b")
    assert 36 <= first[1] <= 44


def _report(cells: list[CellResult]) -> Report:
    report = make_report()
    report.cells += cells
    return report


def test_hopeless_backends_are_not_asked_again_nearby() -> None:
    cells = [measured(1, a=10.0, b=90.0, c=None), measured(256, a=10.0, b=11.0, c=12.0)]
    assert _in_the_running(["a", "b", "c"], [], 1) == ["a", "b", "c"]
    assert _in_the_running(["a", "b", "c"], cells, 4) == ["a", "c"]
    assert _in_the_running(["a", "b", "c"], cells, 512) == ["a", "b", "c"]


def test_real_backends_are_measured_and_kept() -> None:
    report, settings = make_report(), Settings(torch.device("cpu"), cell_s=0.01, budget_s=3.0)
    begin = time.monotonic()
    cells = list(tune(CELL, settings, report))
    assert cells == report.cells
    assert time.monotonic() - begin < 20
    (entry,) = entries(report, CELL, settings)
    assert entry.tokens == sorted(cell.tokens for cell in cells)
    assert set(entry.times_us) <= {"fused", "grouped_mm", "batched_mm", "eager"}
    assert "auto" not in entry.times_us
    assert entry.kind.sizes == (4, 2, 32, 16)
    assert entry.expected_us(entry.tokens[0])


def test_budget_bounds_it_and_one_t_is_always_measured() -> None:
    now = [0.0]

    def slow(weights, x, ids, routing):  # type: ignore[no-untyped-def]
        now[0] += 1.0
        return ExpertsInterface["eager"].forward(weights, x, ids, routing)

    ExpertsInterface.register("slow", Backend("slow", slow))
    try:
        settings = Settings(torch.device("cpu"), cell_s=0.001, budget_s=0.5, clock=lambda: now[0])
        assert [cell.tokens for cell in tune(CELL, settings, make_report())] == [1]
    finally:
        ExpertsInterface.unregister("slow")


def test_wrong_backend_is_not_in_the_table() -> None:
    good = ExpertsInterface["eager"].forward
    ExpertsInterface.register("wrong", Backend("wrong", lambda w, x, ids, r: good(w, x, ids, r) * 2))
    try:
        report, settings = make_report(), Settings(torch.device("cpu"), cell_s=0.01, budget_s=0.0)
        list(tune(CELL, settings, report))
        (entry,) = entries(report, CELL, settings)
        assert "wrong" not in entry.times_us
    finally:
        ExpertsInterface.unregister("wrong")


@pytest.mark.parametrize(
    ("tokens", "times"), [([], {}), ([2, 1], {"a": [1.0, 1.0]}), ([0], {"a": [1.0]}), ([1, 2], {"a": [1.0]})]
)
def test_entry_that_makes_no_sense_is_refused(tokens: list[int], times: dict[str, list[float | None]]) -> None:
    kind = entries(_report([measured(1, a=1.0)]), CELL, Settings(torch.device("cpu")))[0].kind
    with pytest.raises(ValueError):
        Entry(kind, {}, "", tokens, times)
