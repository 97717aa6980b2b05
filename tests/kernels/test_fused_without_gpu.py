"""The fused kernels without a GPU: their logic in Triton's interpreter, their code for every architecture."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs the package triton")


def run(command: list[str], seconds: int, **environment: str) -> str:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


@needs_triton
def test_interpreted_kernels_keep_the_contract() -> None:
    output = run([str(Path(__file__).with_name("interpreted.py"))], 600, TRITON_INTERPRET="1")
    print(output)
    assert output.count("passed") == 5


@needs_triton
def test_every_table_entry_compiles_for_every_architecture_within_its_shared_memory() -> None:
    output = run([str(ROOT / "scripts" / "cross_compile"), "--sample", "60"], 300)
    print(output)
    assert "0 failed" in output
