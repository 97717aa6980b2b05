#!/usr/bin/env python3
"""One layer of experts, forward: every backend of ours beside other projects' own code, checked, then timed.

    python benchmarks/layer_forward.py --shapes Q15,Q30 --tokens 1,64,4096 --out DIR
    python benchmarks/layer_forward.py --shapes 8,2,256,512 --tokens 1,16 --dtype fp32 --out DIR     (E,K,H,I; any CPU)

Writes DIR/results.json after every cell, and DIR/page.md and DIR/plot.png from it.
"""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

# a checkout is measured as it lies here, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer

from moetor import forward
from moetor.bench.cases import ROUTINGS, Cell
from moetor.bench.machine import commit, describe_machine
from moetor.bench.page import one_line, page
from moetor.bench.peers import candidates
from moetor.bench.plot import plot, why_no_plot
from moetor.bench.report import Report
from moetor.bench.roofs import measure_roofs
from moetor.bench.run import MODES, Settings, run
from moetor.bench.shapes import parse_shapes
from moetor.core.errors import MoetorError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(
    shapes: Annotated[str, typer.Option(help="Names, separated by commas, or E,K,H,I.")] = "Q15,Q30,MX,GO,DS",
    tokens: Annotated[str, typer.Option(help="Token counts T.")] = "1,8,64,512,4096,16384",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    who: Annotated[str, typer.Option("--candidates", help="Names, or the groups all, ours, peers.")] = "all",
    routing: Annotated[str, typer.Option(help=f"Of {', '.join(ROUTINGS)}.")] = "uniform",
    mode: Annotated[str, typer.Option(help=f"Of {', '.join(MODES)}; graphs on CUDA only.")] = "call,graph",
    out: Annotated[Path, typer.Option(help="Folder for results.json, page.md and plot.png.")] = Path("bench-results"),
    budget: Annotated[float | None, typer.Option(help="Begin no cell after this many seconds.")] = None,
    cell_seconds: Annotated[float, typer.Option(help="Timing of a cell and mode, all candidates together.")] = 1.0,
    first_seconds: Annotated[float, typer.Option(help="Most for a candidate's check, compilation included.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Of all tensors.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu; the first GPU if there is one.")] = "",
) -> None:
    """Check every candidate against float64, then time it, in one run."""
    try:
        given, chosen = parse_shapes(shapes), candidates(who)
    except MoetorError as error:
        raise typer.BadParameter(str(error)) from error
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if forward.OVERRIDE:
        raise typer.BadParameter("MOETOR_EXPERTS is set, so every backend of ours would be the same one; unset it")
    modes = _listed(mode, MODES, "mode")
    if where.type != "cuda":
        modes = [m for m in modes if m != "graph"] or ["call"]
    if dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    routings = _listed(routing, ROUTINGS, "routing")
    counts = [int(T) if T.strip().isdecimal() else 0 for T in tokens.split(",")]
    if not all(counts):
        raise typer.BadParameter(f"token counts must be numbers of at least 1, got {tokens}")
    cells = [Cell(shape, T, DTYPES[dtype], kind, seed) for shape in given for kind in routings for T in counts]
    settings = Settings(where, modes, cell_seconds, first_seconds, budget)

    out.mkdir(parents=True, exist_ok=True)
    command = "python " + shlex.join(sys.argv)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(command, commit(), date, describe_machine(where), measure_roofs(where, DTYPES[dtype]))
    roofs = report.roofs
    print(f"{report.machine['device']}, commit {report.commit}", flush=True)
    print(
        f"roofs: {roofs.bytes_per_s / 1e9:.0f} GB/s, {roofs.flops_per_s / 1e12:.2f} TFLOP/s; µs, call/graph", flush=True
    )
    for result in run(cells, chosen, settings, report):
        print(one_line(result), flush=True)
        report.save(out / "results.json")
        (out / "page.md").write_text(page(report), encoding="utf-8")
    _finish(report, out)


def _listed(text: str, known: tuple[str, ...], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return names


def _finish(report: Report, out: Path) -> None:
    """The last JSON and page, with what was left out, and the picture if there can be one."""
    report.save(out / "results.json")
    no_plot = why_no_plot()
    if no_plot:
        print(f"no plot: {no_plot}")
    elif report.cells:
        plot(report, out / "plot.png")
    picture = "plot.png" if report.cells and not no_plot else None
    (out / "page.md").write_text(page(report, plot=picture), encoding="utf-8")
    for line in report.left_out:
        print(f"not run: {line}")
    print(f"wrote {len(report.cells)} cells to {out}")


if __name__ == "__main__":
    typer.run(main)
