"""`moetor bench`: one layer of experts, every backend in every cell, checked, then timed."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import forward
from ..bench.cases import ROUTINGS, Cell
from ..bench.compare import compare as compare_reports
from ..bench.machine import commit, describe_machine
from ..bench.page import label, one_line
from ..bench.peers import Candidate, candidates
from ..bench.report import Report
from ..bench.roofs import measure_roofs
from ..bench.run import Settings
from ..bench.run import run as run_cells
from ..bench.samplers import MODES
from ..bench.shapes import SHAPES
from ..bench.write import save, save_all
from ..core.errors import InvalidInput
from . import bench_model
from .bench_options import DTYPES, MEASURED_FORMATS, PASSES, counts_of, device_named, names_of, shapes_of
from .bench_terminal import fastest, line, progress
from .terminal import err, errors_in_one_line, out

INTERRUPTED = 130  # as a shell says it


def run(
    shape: Annotated[
        list[str] | None, typer.Option(help="Of a real model, see --list, or E,K,H,I. May be repeated.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model's folder or config.json, for its shape.")] = None,
    tokens: Annotated[str, typer.Option(help="Token counts T.")] = "1,8,64,512,4096",
    dtype: Annotated[str, typer.Option(help="Of bf16, fp16 and fp32. [default: bf16 on a GPU, fp32 on a CPU]")] = "",
    format: Annotated[str, typer.Option(help="Of the weights: dense, fp8, mxfp4 and others.")] = "dense",
    passes: Annotated[str, typer.Option("--pass", help="Of forward and training.")] = "forward",
    mode: Annotated[
        str, typer.Option(help="Of call, graph and torch.compile's. [default: call, and on a GPU graph]")
    ] = "",
    routing: Annotated[str, typer.Option(help="Of uniform, zipf and one_expert.")] = "uniform",
    backend: Annotated[str, typer.Option(help="Backends by name; ours: all of them.")] = "ours",
    peer: Annotated[
        str, typer.Option(help="Others' own code, on the same tensors: transformers, liger; peers: both.")
    ] = "",
    device: Annotated[str, typer.Option(help="[default: the first GPU, else the CPU]")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch on the CPU; 0: its own choice.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Of timing, for a cell and mode, all backends together.")] = 1.0,
    first_seconds: Annotated[
        float, typer.Option(min=0, help="Most for a check, compilation included; slower ones are left out.")
    ] = 120.0,
    budget: Annotated[float | None, typer.Option(min=0, help="Begin no cell after this many seconds.")] = None,
    seed: Annotated[int, typer.Option(help="Of all tensors.")] = 0,
    whole_model: Annotated[
        bool, typer.Option("--whole-model", help="Prefill and decode of --model with random weights, all of it.")
    ] = False,
    batch: Annotated[str, typer.Option(help="Sequences of a whole model.")] = "1,4",
    length: Annotated[str, typer.Option(help="Their prompts' tokens.")] = "16,128,512,2048",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of a whole model, if not all.")] = None,
    output: Annotated[
        Path, typer.Option("--out", help="Folder for results.json, results.csv, report.html, page.md and plot.png.")
    ] = Path("bench-results"),
    json: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the CSV here as well.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Measure nothing: say what changed from A.json to B.json.")
    ] = None,
    again: Annotated[
        Path | None, typer.Option(help="Measure nothing: write this JSON's report, page and plot into --out.")
    ] = None,
    list_shapes: Annotated[
        bool, typer.Option("--list", help="Measure nothing: list the shapes of real models.")
    ] = False,
) -> None:
    """Measure one layer of experts: every backend in every cell, checked against float64, then timed in turn.

    Results are printed as they come and kept in --out after every cell, so that an interrupted run keeps what it has.
    A wrong result gets no time; what is refused, fails or lacks memory is a cell with its reason.
    """
    if list_shapes:
        for each in SHAPES.values():
            sizes = f"{each.experts},{each.top_k},{each.hidden},{each.intermediate}"
            line(out, f"{each.name:6} {each.model:24} {sizes}")
        return
    if compare:
        _compare(*compare)
        return
    if again:
        with errors_in_one_line(OSError):
            report = Report.load(again)
            output.mkdir(parents=True, exist_ok=True)
            for note in save_all(report, output, json, csv):
                line(err, note)
        return
    with errors_in_one_line():
        if forward.OVERRIDE:
            raise InvalidInput("MOETOR_EXPERTS is set, so every backend of ours would be the same one; unset it")
        where = device_named(device)
        kinds = names_of("dtype", dtype or ("fp32" if where.type == "cpu" else "bf16"), DTYPES)
        if whole_model:
            interrupted = bench_model.run(
                model,
                DTYPES[kinds[0]],
                where,
                batch=batch,
                length=length,
                layers=layers,
                mode=mode,
                backend=backend,
                seconds=seconds,
                first_seconds=first_seconds,
                budget=budget,
                folder=output,
                json=json,
            )
            raise typer.Exit(INTERRUPTED if interrupted else 0)
        modes = names_of("mode", mode or ("call,graph" if where.type == "cuda" else "call"), MODES)
        if "graph" in modes and where.type != "cuda":
            raise InvalidInput(f"--mode graph needs a CUDA device, got {where}")
        cells = [
            Cell(shape, T, DTYPES[kind], spread, weights, PASSES[way], seed)
            for shape in shapes_of(shape, model)
            for kind in kinds
            for weights in names_of("format", format, MEASURED_FORMATS)
            for way in names_of("pass", passes, PASSES)
            for spread in names_of("routing", routing, ROUTINGS)
            for T in counts_of(tokens)
        ]
        chosen = candidates(",".join(filter(None, (backend, peer))))
        if threads:
            torch.set_num_threads(threads)
        settings = Settings(where, modes, seconds, first_seconds, budget)
        command, date = shlex.join(["moetor", *sys.argv[1:]]), datetime.now(UTC).isoformat(timespec="seconds")
        report = Report(command, commit(), date, describe_machine(where), measure_roofs(where, DTYPES[kinds[0]]))
    with errors_in_one_line(OSError):
        _measure(cells, chosen, settings, report, output, json, csv)


def _measure(
    cells: list[Cell],
    chosen: list[Candidate],
    settings: Settings,
    report: Report,
    folder: Path,
    json: Path | None,
    csv: Path | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    roofs = report.roofs
    line(out, f"{report.machine['device']}, torch {report.machine['torch']}, commit {report.commit}")
    product = f"{roofs.flops_per_s / 1e12:.3g} TFLOP/s in {roofs.dtype}"
    line(out, f"roofs: {roofs.bytes_per_s / 1e9:.3g} GB/s copy, {product}; µs, {' / '.join(settings.modes)}")
    interrupted = False
    with progress(len(cells)) as advance:
        try:
            for result in run_cells(cells, chosen, settings, report):
                line(out, one_line(result))
                save(report, folder, json)
                advance(label(result))
        except KeyboardInterrupt:
            interrupted = True
            report.left_out += [f"{cell}: interrupted" for cell in cells[len(report.cells) :]]
    for note in [*save_all(report, folder, json, csv), *(f"not run: {text}" for text in report.left_out)]:
        line(err, note)
    for table in fastest(report):
        out.print(table)
    line(out, f"{len(report.cells)} of {len(cells)} cells in {folder}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _compare(first: Path, second: Path) -> None:
    with errors_in_one_line(OSError):
        found = compare_reports(Report.load(first), Report.load(second))
    changed = sorted(found.beyond_noise, key=lambda change: -change.ratio)
    for text in [*found.notes, *map(str, changed)]:
        line(out, text)
    line(out, f"{len(changed)} of {len(found.changes)} times changed beyond noise")
