"""`moetor bench`: what it prints, what it leaves behind, and how it says no."""

import json
from dataclasses import replace

import pytest
import torch

from moetor import Backend, ExpertsInterface
from moetor.bench import run as harness
from moetor.bench.report import Report

from ..bench.schema import problems

TINY = ("--shape", "4,2,32,16", "--device", "cpu", "--seconds", "0.02")


def test_run_leaves_data_page_and_report(moetor, tmp_path):
    result = moetor("bench", *TINY, "--tokens", "1,5", "--peer", "transformers", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "results.json").read_text())
    assert problems(data) == []
    assert [cell["tokens"] for cell in data["cells"]] == [1, 5]
    assert {row["candidate"] for row in data["cells"][0]["rows"]} > {"auto", "eager", "transformers:eager"}
    assert all(row["times"] for cell in data["cells"] for row in cell["rows"] if row["status"] == "ok")
    assert Report.load(tmp_path / "results.json").cells[0].fastest("call", peer=True)
    assert {"results.csv", "report.html", "page.md"} <= {path.name for path in tmp_path.iterdir()}
    assert "E4-K2-H32-I16 float32 uniform T=5 floor" in result.stdout
    assert "fastest of ours" in result.stdout
    assert "2 of 2 cells" in result.stdout


def test_all_kinds_of_cells_and_extra_files(moetor, tmp_path):
    kinds = ["--shape", "4,2,64,32", "--dtype", "fp32,bf16", "--format", "dense,fp8", "--pass", "forward,training"]
    more = ["--routing", "zipf,one_expert", "--tokens", "3", "--backend", "eager", "--out", tmp_path / "out"]
    files = ["--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv"]
    result = moetor("bench", *TINY[2:], *kinds, *more, *files)
    assert result.exit_code == 0, result.output
    report = Report.load(tmp_path / "a.json")
    assert len(report.groups()) == len(report.cells) == 16
    assert all(row.status == "ok" for cell in report.cells for row in cell.rows)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 17


def test_interrupted_run_keeps_what_it_has(moetor, tmp_path, monkeypatch):
    make, made = harness.make_draws, []

    def interrupted(cell, device):
        made.append(cell)
        if len(made) == 2:
            raise KeyboardInterrupt
        return make(cell, device)

    monkeypatch.setattr(harness, "make_draws", interrupted)
    result = moetor("bench", *TINY, "--tokens", "1,2,3", "--backend", "eager", "--out", tmp_path)
    assert result.exit_code == 130
    report = Report.load(tmp_path / "results.json")
    assert [cell.tokens for cell in report.cells] == [1]
    assert len(report.left_out) == 2
    assert "interrupted" in (tmp_path / "report.html").read_text()
    assert "1 of 3 cells" in result.stdout


def test_too_little_memory_for_a_cell_is_a_cell(moetor, tmp_path, monkeypatch):
    make = harness.make_draws

    def hungry(cell, device):
        if cell.tokens == 2:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return make(cell, device)

    monkeypatch.setattr(harness, "make_draws", hungry)
    result = moetor("bench", *TINY, "--tokens", "1,2,3", "--backend", "eager", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    statuses = [cell.rows[0].status for cell in Report.load(tmp_path / "results.json").cells]
    assert statuses == ["ok", "out of memory", "ok"]
    assert problems(json.loads((tmp_path / "results.json").read_text())) == []


def test_wrong_backend_is_named_and_gets_no_time(moetor, tmp_path):
    good = ExpertsInterface["eager"].forward
    ExpertsInterface.register(
        "planted", Backend("planted", lambda w, x, ids, r: good(w, x, ids, r) * (1 + (len(x) == 1)))
    )
    try:
        result = moetor("bench", *TINY, "--tokens", "1,2", "--backend", "planted,eager", "--out", tmp_path)
    finally:
        ExpertsInterface.unregister("planted")
    at_one, at_two = (cell.rows[0] for cell in Report.load(tmp_path / "results.json").cells)
    assert (at_one.status, at_one.times) == ("wrong", {})
    assert at_two.times
    assert "planted WRONG" in result.stdout


def test_compare_says_what_changed(moetor, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    moetor("bench", *TINY, "--tokens", "2", "--backend", "eager", "--out", tmp_path / "out", "--json", first)
    data = json.loads(first.read_text())
    time = data["cells"][0]["rows"][0]["times"]["call"]
    time |= {"median_us": 100.0, "q1_us": 99.0, "q3_us": 101.0}
    first.write_text(json.dumps(data))
    time |= {"median_us": 130.0, "q1_us": 129.0, "q3_us": 131.0}
    second.write_text(json.dumps(data))
    assert "0 of 1 times changed" in moetor("bench", "--compare", first, first).stdout
    result = moetor("bench", "--compare", first, second)
    assert "eager call: 100.0 -> 130.0 µs, 30% slower" in result.stdout
    assert "1 of 1 times changed beyond noise" in result.stdout


def test_model_gives_its_shape(moetor, checkpoint, tmp_path):
    result = moetor("bench", "--model", checkpoint, *TINY[2:], "--tokens", "2", "--backend", "eager", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    shape = Report.load(tmp_path / "results.json").cells[0].shape
    assert (shape.experts, shape.top_k, shape.hidden, shape.intermediate) == (4, 2, 32, 16)


def test_whole_model_takes_turns_with_transformers(moetor, checkpoint, tmp_path):
    sizes = ["--whole-model", "--batch", "1,2", "--length", "5", "--seconds", "0.02", "--device", "cpu"]
    result = moetor("bench", "--model", checkpoint, *sizes, "--backend", "grouped_mm", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "results.json").read_text())
    cells = [(cell["phase"], cell["batch"], cell["length"]) for cell in data["cells"]]
    assert cells == [("prefill", 1, 5), ("decode", 1, 5), ("prefill", 2, 5), ("decode", 2, 5)]
    names = ["eager", "batched_mm", "grouped_mm", "moetor", "moetor:grouped_mm"]
    for cell in data["cells"]:
        assert [row["implementation"] for row in cell["rows"]] == names
        assert all(row["time"]["samples"] >= 5 for row in cell["rows"]), cell
        assert cell["rows"][0]["error"] == 0
    assert "| decode | 2 | 5 |" in (tmp_path / "page.md").read_text()
    assert "4 of 4 cells" in result.stdout


def test_whole_model_with_wrong_experts_gets_no_time(moetor, checkpoint, tmp_path, monkeypatch):
    good = ExpertsInterface["fused"]
    wrong = replace(good, forward=lambda w, x, ids, r: good.forward(w, x, ids, r) * (1 + (len(x) == 1)))
    ExpertsInterface.register("fused", wrong, replace=True)
    try:
        sizes = ["--whole-model", "--batch", "1", "--length", "5", "--seconds", "0.02", "--device", "cpu"]
        moetor("bench", "--model", checkpoint, *sizes, "--out", tmp_path)
    finally:
        ExpertsInterface.register("fused", good, replace=True)
    prefill, decode = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [row["status"] for row in prefill["rows"]] == ["ok"] * 4
    assert [row["status"] for row in decode["rows"]] == ["ok"] * 3 + ["wrong"]
    assert decode["rows"][3]["time"] is None


def test_pages_are_made_again_from_the_data(moetor, tmp_path):
    moetor("bench", *TINY, "--tokens", "2", "--backend", "eager", "--out", tmp_path / "a")
    result = moetor("bench", "--again", tmp_path / "a" / "results.json", "--out", tmp_path / "b")
    assert result.exit_code == 0, result.output
    for name in ("report.html", "results.csv", "results.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_list_names_a_dozen_models(moetor):
    assert len(moetor("bench", "--list").stdout.splitlines()) >= 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs --shape or --model"),
        (("--shape", "nothing"), "unknown shape 'nothing'"),
        (("--model", "nowhere"), "config.json"),
        ((*TINY, "--backend", "nobody"), "unknown candidate 'nobody'"),
        ((*TINY, "--peer", "nobody"), "unknown candidate 'nobody'"),
        ((*TINY, "--tokens", "0"), "at least 1, got 0"),
        ((*TINY, "--dtype", "int"), "unknown dtype 'int'"),
        ((*TINY, "--mode", "x"), "unknown mode 'x'"),
        ((*TINY, "--mode", "graph"), "needs a CUDA device"),
        ((*TINY, "--format", "fp3"), "unknown format 'fp3'"),
        ((*TINY, "--pass", "backward"), "unknown pass 'backward'"),
        ((*TINY, "--whole-model"), "needs one --model"),
        ((*TINY, "--routing", "random"), "unknown routing 'random'"),
        (("--compare", "nowhere", "nothing"), "nowhere"),
    ],
)
def test_wrong_command_is_refused_in_one_line(moetor, one_line, arguments, words, tmp_path):
    result = moetor("bench", *arguments, *(() if "--compare" in arguments else ("--out", tmp_path / "out")))
    assert result.exit_code in (1, 2)
    assert words in one_line(result.stderr)
    assert not (tmp_path / "out").exists()
