"""`moetor demo`: the same text on every backend, or a failure that names those that differ."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from moetor import Backend, ExpertsInterface
from moetor.cli.demo import TINY


@pytest.fixture
def stranger():
    """register(backend) for one test."""
    names = []

    def register(backend: Backend) -> None:
        ExpertsInterface.register(backend.name, backend)
        names.append(backend.name)

    yield register
    for name in names:
        ExpertsInterface.unregister(name)


def demo(moetor, checkpoint):
    return moetor("demo", "--model", checkpoint, "--max-new-tokens", "12", "--device", "cpu")


def test_every_backend_writes_the_same_greedy_text(moetor, checkpoint):
    result = demo(moetor, checkpoint)
    assert result.exit_code == 0
    here = [n for n in ExpertsInterface.names() if not ExpertsInterface[n].machine_why_not(torch.device("cpu"))]
    assert f"greedy, by eager, {', '.join(name for name in here if name != 'eager')}" in result.stdout
    assert "auto → fused" in result.stdout
    assert "no, from token" not in result.stdout


def test_backend_that_writes_something_else_fails_the_demo(moetor, checkpoint, stranger, one_line):
    eager = ExpertsInterface["eager"]
    stranger(Backend("mirrored", lambda *call: -eager.forward(*call)))
    result = demo(moetor, checkpoint)
    assert result.exit_code == 1
    assert one_line(result.stderr).endswith("differs from eager's on: mirrored")
    assert "greedy, by mirrored" in result.stdout
    assert "no, from token" in result.stdout


def test_backend_of_another_machine_is_skipped_with_its_reason(moetor, checkpoint, stranger):
    stranger(replace(ExpertsInterface["eager"], name="martian", machine_why_not=lambda device: "needs thinner air"))
    result = demo(moetor, checkpoint)
    assert result.exit_code == 0
    assert "skipped: needs thinner air" in result.stdout


def test_backend_that_refuses_float32_is_skipped_with_its_reason(moetor, checkpoint, stranger):
    stranger(replace(ExpertsInterface["eager"], name="halves", why_not=lambda weights, call: "needs bfloat16"))
    result = demo(moetor, checkpoint)
    assert result.exit_code == 0
    assert "needs bfloat16" in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(not TINY.exists(), reason="the tiny model is not in this checkout")
def test_shipped_model_writes_words_within_45_seconds():
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "120"}
    result = subprocess.run(
        [sys.executable, "-m", "moetor", "demo"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert time.perf_counter() - start < 45
    assert " the " in result.stdout
