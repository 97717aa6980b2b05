"""`moetor tune`: what it measures is what `auto` goes by."""

import json

import pytest

from moetor import ExpertsInterface
from moetor.backends import timings
from moetor.core.interface import describe_call
from moetor.testing import Case, make_inputs

TINY = ("--shape", "4,2,32,16", "--device", "cpu", "--seconds", "0.01", "--budget", "2")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETOR_CACHE", str(tmp_path))
    timings.forget()
    yield tmp_path
    monkeypatch.undo()
    timings.forget()


def test_auto_goes_by_what_was_measured(moetor, cache):
    result = moetor("tune", *TINY, "--pass", "forward,training")
    assert result.exit_code == 0, result.output
    assert "fastest, call, by tokens: 1–" in result.stdout
    data = json.loads((cache / "timings.json").read_text())
    assert [entry["kind"]["training"] for entry in data["entries"]] == [False, True]
    case = Case(tokens=1, experts=4, top_k=2, hidden=32, intermediate=16, frozen=frozenset({"x", "weights", "routing"}))
    inputs = make_inputs(case)
    call = describe_call(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    explanation = ExpertsInterface.explain(inputs.weights, call)
    times = {name: us[0] for name, us in data["entries"][0]["times_us"].items() if us[0] is not None}
    assert explanation.chosen == min(times, key=times.get)
    assert "`moetor tune` measured" in explanation.how["auto"]


def test_table_is_removed(moetor, cache):
    moetor("tune", *TINY[:-1], "0")
    assert (cache / "timings.json").exists()
    assert moetor("tune", "--clear").exit_code == 0
    assert not (cache / "timings.json").exists()
    assert moetor("tune", "--clear").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "needs --shape or --model"), ((*TINY, "--dtype", "int"), "unknown dtype"), ((*TINY, "--pass", "x"), "pass")],
)
def test_wrong_command_is_refused_in_one_line(moetor, one_line, cache, arguments, words):
    result = moetor("tune", *arguments)
    assert result.exit_code == 2
    assert words in one_line(result.stderr)
