"""JSON that reads back and fits its schema, a page that leaves nothing out, CSV, and a plot."""

import csv
import json
from pathlib import Path

import pytest

from moetor.bench.measure import Timing
from moetor.bench.page import one_line, page
from moetor.bench.plot import plot, why_no_plot
from moetor.bench.report import CellResult, Report, Row
from moetor.bench.roofs import Roofs
from moetor.bench.shapes import SHAPES
from moetor.bench.table import save_csv
from moetor.core.errors import InvalidInput

from .schema import problems


def make_report() -> Report:
    """Two shapes, two sizes, and each kind of row."""
    cells = []
    for name in ("Q15", "GO"):
        for tokens in (1, 8192):
            rows = [
                Row(
                    "fused",
                    False,
                    error=4e-3,
                    extra_bytes=2**20,
                    times={"call": Timing(40, 39, 41, 9), "graph": Timing(20, 19, 22, 9)},
                ),
                Row("liger", True, error=4e-3, times={"call": Timing(80, 79, 81, 9)}, no_time={"graph": "no capture"}),
                Row("sonicmoe", True, "wrong", "the result is off by 1.0e+00", error=1.0),
                Row("eager", False, "out of memory", "needs more"),
            ]
            costs = {"draws": 4, "layers": 2, "hit": 4.0, "flops": 8e9, "weight_bytes": 9e6, "activation_bytes": 1e6}
            kind = SHAPES[name], tokens, "bfloat16", "dense", "zipf", False, 0
            cells.append(CellResult(*kind, **costs, floor_us=10.0, rows=rows))
    machine = {"device": "a GPU", "driver": None, "torch": "2"}
    return Report("python script", "abc", "2026-02-03T00:00:00+00:00", machine, Roofs(4e12, 7e14, "bfloat16"), cells)


@pytest.fixture
def report() -> Report:
    return make_report()


def test_json_reads_back_the_same(report: Report, tmp_path: Path) -> None:
    report.left_out.append("GO T=1: no time")
    path = tmp_path / "results.json"
    report.save(path)
    assert Report.load(path) == report
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_json_fits_its_schema(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    report.save(path)
    data = json.loads(path.read_text())
    assert problems(data) == []
    data["cells"][1]["rows"][0]["times"]["call"]["median_us"] = "40"
    del data["cells"][0]["tokens"]
    data["roofs"]["colour"] = "red"
    data["cells"][2]["rows"][2]["status"] = "fine"
    assert sorted(problems(data)) == [
        "cells/0: lacks tokens",
        "cells/1/rows/0/times/call/median_us: '40' is no number",
        "cells/2/rows/2/status: 'fine' is none of ['ok', 'refused', 'wrong', 'failed', 'out of memory', 'timed out']",
        "roofs: does not know colour",
    ]


def test_csv_has_a_line_for_each_time_and_each_reason(report: Report, tmp_path: Path) -> None:
    save_csv(report, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 * (2 + 2 + 1 + 1)
    assert [(line["mode"], line["median_us"], line["reason"]) for line in lines[:6]] == [
        ("call", "40", ""),
        ("graph", "20", ""),
        ("call", "80", ""),
        ("graph", "", "no capture"),
        ("", "", "the result is off by 1.0e+00"),
        ("", "", "needs more"),
    ]
    assert lines[1]["tflop_per_s"] == "400.0"


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1}', '{"schema": 2, "roofs": {}}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InvalidInput):
        Report.load(path)


def test_page_holds_every_cell_and_reason(report: Report) -> None:
    text = page(report, plot="plot.png")
    for cell in report.cells:
        for row in cell.rows:
            assert f"| {cell.tokens} | bfloat16 zipf | 4.0 | 10.0 | {row.candidate} |" in text
    assert "40.0 (39.0–41.0) | 20.0 (19.0–22.0) | 500 | 400 | 50 | 2.00 | 1.0 | 4.0e-03" in text
    assert "| Q15 bfloat16 zipf | 1 | 10.0 | call | fused | 40.0 | 4.00 | liger | 80.0 | **2.00** |" in text
    assert "**sonicmoe** wrong: the result is off by 1.0e+00 (all cells)" in text
    assert "**liger** no graph: no capture (all cells)" in text
    assert "plot.png" in text
    assert "WRONG" in one_line(report.cells[0])


def test_plot_is_a_picture(report: Report, tmp_path: Path) -> None:
    if reason := why_no_plot():
        pytest.skip(reason)
    path = tmp_path / "plot.png"
    plot(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")
