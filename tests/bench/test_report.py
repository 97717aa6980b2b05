"""JSON that reads back, a page that leaves nothing out, a plot, and the script that makes them."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moetor.bench.measure import Timing
from moetor.bench.page import one_line, page
from moetor.bench.plot import plot, why_no_plot
from moetor.bench.report import CellResult, Report, Row
from moetor.bench.roofs import Roofs
from moetor.bench.shapes import SHAPES
from moetor.core.errors import InvalidInput

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def report() -> Report:
    cells = []
    for name in ("Q15", "GO"):
        for tokens in (1, 8192):
            rows = [
                Row(
                    "fused",
                    False,
                    error=4e-3,
                    extra_bytes=2**20,
                    call=Timing(40, 39, 41, 9),
                    graph=Timing(20, 19, 22, 9),
                ),
                Row("liger", True, error=4e-3, call=Timing(80, 79, 81, 9), graph_reason="cannot be captured"),
                Row("sonicmoe", True, "wrong", "the result is off by 1.0e+00", error=1.0),
                Row("eager", False, "out of memory", "needs more"),
            ]
            costs = {"draws": 4, "layers": 2, "hit": 4.0, "flops": 8e9, "weight_bytes": 9e6, "activation_bytes": 1e6}
            cells.append(CellResult(SHAPES[name], tokens, "bfloat16", "zipf", 0, **costs, floor_us=10.0, rows=rows))
    machine = {"device": "a GPU", "driver": None, "torch": "2"}
    return Report("python script", "abc", "2026-02-03T00:00:00+00:00", machine, Roofs(4e12, 7e14, "bfloat16"), cells)


def test_json_reads_back_the_same(report: Report, tmp_path: Path) -> None:
    report.left_out.append("GO T=1: no time")
    path = tmp_path / "results.json"
    report.save(path)
    assert Report.load(path) == report
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 2}', '{"schema": 1, "roofs": {}}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InvalidInput):
        Report.load(path)


def test_page_holds_every_cell_and_reason(report: Report) -> None:
    text = page(report, plot="plot.png")
    for cell in report.cells:
        for row in cell.rows:
            assert f"| {cell.tokens} | zipf | 4.0 | 10.0 | {row.candidate} |" in text
    assert "40.0 (39.0–41.0) | 20.0 (19.0–22.0) | 500 | 400 | 50 | 2.00 | 1.0 | 4.0e-03" in text
    assert "| Q15 | bfloat16 | zipf | 1 | 10.0 | call | fused | 40.0 | 4.00 | liger | 80.0 | **2.00** |" in text
    assert "**sonicmoe** wrong: the result is off by 1.0e+00 (all cells)" in text
    assert "**liger** no graph: cannot be captured (all cells)" in text
    assert "plot.png" in text
    assert "WRONG" in one_line(report.cells[0])


def test_plot_is_a_picture(report: Report, tmp_path: Path) -> None:
    if reason := why_no_plot():
        pytest.skip(reason)
    path = tmp_path / "plot.png"
    plot(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def script() -> ModuleType:
    return load("layer_forward")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def invoke(script: ModuleType, *arguments: str):  # type: ignore[no-untyped-def]
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})


def test_script_writes_json_and_page(script: ModuleType, tmp_path: Path) -> None:
    sizes = ["--shapes", "4,2,32,16", "--tokens", "1,5", "--dtype", "fp32", "--device", "cpu", "--cell-seconds", "0.02"]
    done = invoke(script, *sizes, "--candidates", "eager,transformers:eager", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [cell["tokens"] for cell in saved["cells"]] == [1, 5]
    assert all(row["status"] == "ok" and row["call"]["samples"] >= 5 for cell in saved["cells"] for row in cell["rows"])
    assert (tmp_path / "page.md").read_text() == page(
        Report.load(tmp_path / "results.json"), plot=None if why_no_plot() else "plot.png"
    )
    assert "E4-K2-H32-I16 T=5" in done.output


@pytest.mark.parametrize(
    "arguments",
    [("--shapes", "nothing"), ("--candidates", "nobody"), ("--tokens", "0"), ("--dtype", "int"), ("--mode", "x")],
)
def test_script_refuses_in_words(script: ModuleType, arguments: tuple[str, str], tmp_path: Path) -> None:
    done = invoke(script, *arguments, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_script_for_the_cpu_gives_ratios(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    sizes = ["--shapes", "4,2,32,16", "--tokens", "3", "--dtype", "fp32", "--cell-seconds", "0.02"]
    options = ["--threads", str(threads), "--out", str(tmp_path)]
    done = invoke(load("layer_forward_cpu"), *sizes, *options)
    assert done.exit_code == 0, done.output
    rows = {row.candidate: row.call for row in Report.load(tmp_path / "results.json").cells[0].rows}
    fastest = min(rows[f"transformers:{name}"].median_us for name in ("eager", "grouped_mm"))
    for name in ("eager", "grouped_mm"):
        (line,) = [line for line in done.output.splitlines() if f" | {name} | " in line]
        ratios = [f"{peer / rows[name].median_us:.3f}" for peer in (rows[f"transformers:{name}"].median_us, fastest)]
        assert line.endswith(" | ".join(ratios))
