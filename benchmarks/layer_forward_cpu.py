#!/usr/bin/env python3
"""One layer of experts on the CPU, forward: each backend of ours over transformers' own, checked, then timed in turn.

    python benchmarks/layer_forward_cpu.py --tokens 1,16,64,256 --dtype bf16 --threads 2 --out DIR

Ratios are their time over ours, so that above 1 ours is ahead: beside the peer of the same name, and
beside the fastest peer. Writes DIR/results.json after every cell, and DIR/page.md from it.
"""

import shlex
import sys
from collections.abc import Iterator
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
from moetor.bench.page import page
from moetor.bench.peers import candidates
from moetor.bench.report import CellResult, Report, Row
from moetor.bench.roofs import measure_roofs
from moetor.bench.run import Settings, run
from moetor.bench.shapes import parse_shapes
from moetor.core.errors import MoetorError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CANDIDATES = "eager,grouped_mm,transformers:eager,transformers:grouped_mm"


def main(
    shapes: Annotated[str, typer.Option(help="Names, separated by commas, or E,K,H,I.")] = "Q15",
    tokens: Annotated[str, typer.Option(help="Token counts T.")] = "1,16,64,256",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    who: Annotated[str, typer.Option("--candidates", help="Names, or the groups all, ours, peers.")] = CANDIDATES,
    routing: Annotated[str, typer.Option(help=f"One of {', '.join(ROUTINGS)}.")] = "uniform",
    threads: Annotated[int, typer.Option(help="Of PyTorch.")] = 2,
    cell_seconds: Annotated[float, typer.Option(help="Timing of a cell, all candidates together.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of all tensors.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for results.json and page.md.")] = Path("bench-results"),
) -> None:
    """Check every candidate against float64, then time them in turn, in one run."""
    try:
        given, chosen = parse_shapes(shapes), candidates(who)
    except MoetorError as error:
        raise typer.BadParameter(str(error)) from error
    if forward.OVERRIDE:
        raise typer.BadParameter("MOETOR_EXPERTS is set, so every backend of ours would be the same one; unset it")
    if dtype not in DTYPES or routing not in ROUTINGS:
        raise typer.BadParameter(f"dtype must be one of {', '.join(DTYPES)} and routing of {', '.join(ROUTINGS)}")
    counts = [int(T) if T.strip().isdecimal() else 0 for T in tokens.split(",")]
    if not all(counts):
        raise typer.BadParameter(f"token counts must be numbers of at least 1, got {tokens}")
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    cells = [Cell(shape, T, DTYPES[dtype], routing, seed) for shape in given for T in counts]

    out.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    roofs = measure_roofs(device, DTYPES[dtype])
    report = Report("python " + shlex.join(sys.argv), commit(), date, describe_machine(device), roofs)
    print(f"{report.machine['device']}, torch {report.machine['torch']}, commit {report.commit}")
    print(f"roofs: {roofs.bytes_per_s / 1e9:.0f} GB/s copy, {roofs.flops_per_s / 1e9:.0f} GFLOP/s")
    print("cell | backend | ms (quartiles) | same peer / ours | fastest peer / ours", flush=True)
    for result in run(cells, chosen, Settings(device, cell_s=cell_seconds), report):
        for line in _lines(result):
            print(line, flush=True)
        report.save(out / "results.json")
        (out / "page.md").write_text(page(report), encoding="utf-8")


def _lines(cell: CellResult) -> Iterator[str]:
    """One a candidate: its time, and what its peers take in multiples of it."""
    rows = {row.candidate: row for row in cell.rows}
    fastest = cell.fastest("call", peer=True)
    for row in cell.rows:
        start = f"{cell.shape.name} T={cell.tokens} {cell.dtype} | {row.candidate}"
        if row.call is None:
            yield f"{start} | {row.status}: {row.reason or row.call_reason}"
            continue
        time = row.call
        ms = f"{time.median_us / 1e3:.3f} ({time.q1_us / 1e3:.3f}–{time.q3_us / 1e3:.3f})"
        ratios = (
            "– | –"
            if row.peer
            else f"{_ratio(row, rows.get(f'transformers:{row.candidate}'))} | {_ratio(row, fastest)}"
        )
        yield f"{start} | {ms} | {ratios}"


def _ratio(ours: Row, peer: Row | None) -> str:
    if peer is None or peer.call is None or ours.call is None:
        return "–"
    return f"{peer.call.median_us / ours.call.median_us:.3f}"


if __name__ == "__main__":
    typer.run(main)
