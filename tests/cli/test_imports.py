"""What it costs to ask for help."""

import pytest

pytest.importorskip("typer")

LOADED = "import sys; print(*(name for name in ('transformers', 'triton') if name in sys.modules))"


def test_import_loads_neither_transformers_nor_triton(python):
    assert python(f"import moetor; {LOADED}").split() == []


def test_help_loads_neither_transformers_nor_triton(python):
    help_text = "from typer.testing import CliRunner; from moetor.cli import app; CliRunner().invoke(app, ['--help'])"
    assert python(f"{help_text}; {LOADED}").split() == []


def test_module_runs_as_a_program(python):
    code = "import runpy, sys; sys.argv = ['moetor', '--help']; runpy.run_module('moetor', run_name='__main__')"
    assert "doctor" in python(code)
