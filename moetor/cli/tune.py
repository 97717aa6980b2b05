"""`moetor tune`: measure which backend is fastest here, for `auto` to choose by."""

import shlex
import sys
from datetime import UTC, datetime
from typing import Annotated

import torch
import typer

from .. import forward
from ..backends import timings
from ..bench.cases import Cell
from ..bench.machine import commit, describe_machine
from ..bench.page import one_line
from ..bench.report import Report
from ..bench.roofs import measure_roofs
from ..bench.run import Settings
from ..bench.tune import crossings, entries, tune
from ..core.errors import InvalidInput
from .bench_options import DTYPES, MEASURED_FORMATS, PASSES, device_named, names_of, shapes_of
from .bench_terminal import line
from .terminal import errors_in_one_line, out


def run(
    shape: Annotated[
        list[str] | None, typer.Option(help="Of a real model, see `moetor bench --list`, or E,K,H,I. May be repeated.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model's folder or config.json, for its shape.")] = None,
    dtype: Annotated[str, typer.Option(help="Of bf16, fp16 and fp32. [default: bf16 on a GPU, fp32 on a CPU]")] = "",
    format: Annotated[str, typer.Option(help="Of the weights: dense, fp8, mxfp4 and others.")] = "dense",
    passes: Annotated[str, typer.Option("--pass", help="Of forward and training.")] = "forward",
    device: Annotated[str, typer.Option(help="[default: the first GPU, else the CPU]")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch on the CPU; 0: its own choice.")] = 0,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds for all of it; the table is the coarser for less.")
    ] = 120.0,
    seconds: Annotated[float, typer.Option(min=0, help="Of timing, for one T and mode, all backends together.")] = 0.4,
    clear: Annotated[bool, typer.Option("--clear", help="Forget everything that was measured.")] = False,
) -> None:
    """Measure which backend is fastest at how many tokens, for `auto`, which goes by moetor's defaults until then.

    The table lies in the user's cache (MOETOR_CACHE names another folder) and counts for this device, these versions
    and these sizes alone. `explain` says what `auto` goes by.
    """
    with errors_in_one_line(OSError):
        if clear:
            timings.path().unlink(missing_ok=True)
            timings.forget()
            line(out, f"removed {timings.path()}")
            return
        if forward.OVERRIDE:
            raise InvalidInput("MOETOR_EXPERTS is set, so every backend of ours would be the same one; unset it")
        where = device_named(device)
        kinds = names_of("dtype", dtype or ("fp32" if where.type == "cpu" else "bf16"), DTYPES)
        cells = [
            Cell(each, 1, DTYPES[kind], format=weights, training=PASSES[way])
            for each in shapes_of(shape, model)
            for kind in kinds
            for weights in names_of("format", format, MEASURED_FORMATS)
            for way in names_of("pass", passes, PASSES)
        ]
        if threads:
            torch.set_num_threads(threads)
        modes = ("call", "graph") if where.type == "cuda" else ("call",)
        settings = Settings(where, modes, seconds, first_s=max(5.0, budget / 4), budget_s=budget / len(cells))
        command, date = shlex.join(["moetor", *sys.argv[1:]]), datetime.now(UTC).isoformat(timespec="seconds")
        report = Report(command, commit(), date, describe_machine(where), measure_roofs(where, DTYPES[kinds[0]], 3))
        for cell in cells:
            _tune(cell, settings, report)


def _tune(cell: Cell, settings: Settings, report: Report) -> None:
    report.left_out.clear()
    try:
        for result in tune(cell, settings, report):
            line(out, one_line(result))
    finally:
        # also what was measured before somebody had enough
        found = entries(report, cell, settings)
        if found:
            file = timings.save(found)
            for entry in found:
                runs = ", ".join(f"{low}–{high} {name}" for low, high, name in crossings(entry))
                line(out, f"fastest, {'graph' if entry.kind.graph else 'call'}, by tokens: {runs}")
            line(out, f"in {file}")
