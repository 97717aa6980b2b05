"""The generated pages: up to date in the checkout, and made by asking."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

from moetor import ExpertsInterface
from moetor.cli import docs


@pytest.fixture
def run():
    program = typer.Typer()
    program.command()(docs.main)
    return lambda *arguments: CliRunner().invoke(program, arguments, catch_exceptions=False)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like a checkout without generated pages."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_text(f"# moetor\n\n{docs.BEGIN}\n{docs.END}\n\nmore\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    return tmp_path


def test_pages_of_this_checkout_are_up_to_date(run):
    result = run("--check")
    assert result.exit_code == 0, result.stderr


def test_stale_pages_are_named_and_written(run, checkout):
    result = run("--check")
    assert result.exit_code == 1
    assert "out of date: docs/backends.md, docs/cli.md, README.md" in " ".join(result.stderr.split())
    assert not (checkout / "docs").exists()
    assert run().exit_code == 0
    assert run("--check").exit_code == 0
    readme = (checkout / "README.md").read_text()
    assert readme.startswith("# moetor\n\n")
    assert readme.endswith(f"\n{docs.END}\n\nmore\n")
    assert "| `grouped_mm` |" in readme


def test_readme_without_markers_is_an_error(run, checkout):
    (checkout / "README.md").write_text("# moetor\n")
    result = run("--check")
    assert result.exit_code == 1
    assert "README.md needs the lines" in result.stderr


def test_table_says_what_backends_say_when_asked(monkeypatch):
    name = "grouped_mm"
    picky = replace(
        ExpertsInterface[name],
        why_not=lambda weights, call: "biases are beyond me" if weights.down.bias is not None else None,
    )
    monkeypatch.setitem(ExpertsInterface._backends, name, picky)
    page = docs.backends_page()
    assert re.search(r"\| biases \| yes \| yes \| no \(\d+\) \| yes \|", page)
    assert re.search(r"\d+\. biases are beyond me", page)
    assert page.count("beyond me") == 2  # once a device
