"""`moetor doctor`: JSON alone on stdout, and a backend that errs is found out."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("typer")

from moetor import Backend, ExpertsInterface
from moetor.cli.doctor import check
from moetor.cli.example import DTYPES, LAYOUTS, make_example

CPU = torch.device("cpu")


def test_json_is_all_of_stdout_and_says_what_runs(moetor):
    result = moetor("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert set(report) == {"versions", "settings", "devices", "backends", "checks"}
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert set(report["backends"]) == set(ExpertsInterface.names())
    on_cpu = [each for each in report["checks"] if each["device"] == "cpu"]
    # inference and training
    assert len(on_cpu) == len(ExpertsInterface.names()) * len(DTYPES) * 2
    assert {each["status"] for each in on_cpu if each["backend"] == "eager"} == {"runs"}
    assert all(each["ran"] == "fused" for each in on_cpu if each["backend"] == "auto")


def test_table_has_a_row_for_each_backend(moetor):
    result = moetor("doctor")
    assert result.exit_code == 0
    for name in ExpertsInterface.names():
        assert f"│ {name} " in result.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ExpertsInterface.names())
def test_every_layout_of_the_grid_runs_or_is_refused(backend, layout):
    result = check(ExpertsInterface[backend], make_example(torch.float32, CPU, LAYOUTS[layout]))
    assert result.status in ("runs", "refused", "unavailable"), result.reason


@pytest.mark.parametrize("training", [False, True])
def test_wrong_result_is_seen(training):
    eager = ExpertsInterface["eager"]
    example = make_example(torch.bfloat16, CPU, LAYOUTS["training"] if training else lambda weights: weights)
    # a third too large, as a gate that was not rescaled would be
    wrong = Backend("wrong", lambda *call: eager.forward(*call) * 1.33)
    assert check(eager, example).status == "runs"
    assert check(wrong, example).status == "wrong"


def test_nan_is_wrong():
    wrong = Backend("wrong", lambda weights, x, index, top_k_weights: x * float("nan"))
    result = check(wrong, make_example(torch.float32, CPU, lambda weights: weights))
    assert result.status == "wrong"
    assert result.error is None  # JSON has no NaN


def test_exception_is_a_failure_with_its_words(moetor):
    def broken(*call: object) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    ExpertsInterface.register("broken", Backend("broken", broken))
    try:
        result = moetor("doctor")
    finally:
        ExpertsInterface.unregister("broken")
    assert result.exit_code == 1
    assert "broken on cpu: RuntimeError: no kernel image" in result.stdout


def test_reason_is_the_backends_own():
    example = make_example(torch.float32, CPU, LAYOUTS["one tensor an expert"])
    refused = check(ExpertsInterface["grouped_mm"], example)
    assert refused.reason == ExpertsInterface["grouped_mm"].why_not(example.weights, example.call)
    absent = replace(ExpertsInterface["eager"], machine_why_not=lambda device: f"needs more than {device}")
    assert check(absent, example).reason == "needs more than cpu"
