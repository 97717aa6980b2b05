"""What changed beyond noise, and what did not."""

import copy
import time
from pathlib import Path

import pytest
import torch

from moetor.bench.cases import Cell
from moetor.bench.compare import Change, compare
from moetor.bench.measure import Timing
from moetor.bench.peers import Bound, Candidate, candidates
from moetor.bench.report import Report
from moetor.bench.roofs import Roofs
from moetor.bench.run import Settings, run
from moetor.bench.shapes import Shape

from .test_report import make_report


def scaled(report: Report, factor: float, *names: str) -> Report:
    """The same with these candidates' times multiplied."""
    report = copy.deepcopy(report)
    for row in (row for cell in report.cells for row in cell.rows if row.candidate in names):
        row.times = {
            mode: Timing(t.median_us * factor, t.q1_us * factor, t.q3_us * factor, t.samples)
            for mode, t in row.times.items()
        }
    return report


def found(before: Report, after: Report) -> list[tuple[str, str]]:
    return [(change.candidate, change.mode) for change in compare(before, after).beyond_noise]


def test_thirty_percent_are_seen_and_five_are_not() -> None:
    before = make_report()
    assert found(before, before) == []
    assert found(before, scaled(before, 1.05, "fused")) == []
    assert found(before, scaled(before, 1.3, "fused")) == [("fused", "call"), ("fused", "graph")] * 4
    assert found(before, scaled(before, 1 / 1.3, "fused")) == [("fused", "call"), ("fused", "graph")] * 4


def test_a_slower_machine_is_told_by_the_peers() -> None:
    before = make_report()
    after = scaled(before, 1.3, "fused", "liger")
    # liger has no graph's time, so there nothing tells the machine's change from ours
    assert {mode for candidate, mode in found(before, after) if candidate == "fused"} == {"graph"}
    change = next(c for c in compare(before, after).changes if (c.candidate, c.mode) == ("fused", "call"))
    assert change.ratio == pytest.approx(1)
    assert change.machine == pytest.approx(1.3)
    # unless it may be the peers' own code that has changed
    after.machine["torch"] = "3"
    assert ("fused", "call") in found(before, after)
    assert "torch: 2 -> 3" in compare(before, after).notes


def test_wide_quartiles_hide_a_change() -> None:
    assert not Change("cell", "fused", "call", 10, 13, ratio=1.3, machine=1, noise=0.4).beyond_noise


def test_what_is_in_one_report_only_is_said() -> None:
    before, after = make_report(), make_report()
    gone = before.cells.pop(1)
    after.cells.pop(0)
    after.cells[1].rows[0].status, after.cells[1].rows[0].reason, after.cells[1].rows[0].times = "wrong", "off", {}
    notes = compare(before, after).notes
    assert f"{gone.group} T={gone.tokens}: only in the second" in notes
    assert any(note.endswith("only in the first") for note in notes)
    assert any("fused: ok -> wrong (off)" in note for note in notes)


def test_an_injected_slow_down_is_seen_in_a_run_and_a_second_run_of_the_same_is_not(tmp_path: Path) -> None:
    def report_of(seconds: float) -> Report:
        eager = candidates("eager")[0]

        def bind(draw) -> Bound:  # type: ignore[no-untyped-def]
            right = eager.bind(draw)()

            def call() -> torch.Tensor:
                time.sleep(seconds)
                return right

            return Bound(call, ())

        report = Report("command", "commit", "date", {"device": "cpu", "torch": "2"}, Roofs(1e10, 1e11, "float32"))
        cell = Cell(Shape("tiny", "none", 4, 2, 32, 16), 3, torch.float32)
        list(
            run([cell], [Candidate("sleeper", eager.why_not, bind, peer=False)], Settings(torch.device("cpu")), report)
        )
        path = tmp_path / "results.json"
        report.save(path)
        return Report.load(path)

    first = report_of(0.02)
    assert found(first, report_of(0.02)) == []
    assert found(first, report_of(0.026)) == [("sleeper", "call")]
