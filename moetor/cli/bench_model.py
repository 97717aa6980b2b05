"""`moetor bench --whole-model`: prefill and decode of a model of transformers, by implementation of its experts."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..bench.machine import commit, describe_machine
from ..bench.model_report import ModelCell, ModelReport, model_page
from ..bench.samplers import COMPILE_MODES
from ..bench.whole_model import IMPLEMENTATIONS, build, run_model
from ..core.errors import InvalidInput
from ..core.interface import ExpertsInterface
from .bench_options import counts_of, names_of
from .bench_terminal import line, progress
from .terminal import err, out


def run(
    models: list[str] | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch: str,
    length: str,
    layers: int | None,
    mode: str,
    backend: str,
    seconds: float,
    first_seconds: float,
    budget: float | None,
    folder: Path,
    json: Path | None,
) -> bool:
    """Measure, print and write; whether it was interrupted."""
    if not models or len(models) != 1:
        raise InvalidInput("--whole-model needs one --model, a folder with a config.json of transformers")
    modes = names_of("mode", mode or "call", ("call", *COMPILE_MODES))
    named = () if backend == "ours" else names_of("backend", backend, ExpertsInterface.names())
    implementations = [*IMPLEMENTATIONS, *(f"moetor:{name}" for name in named if name != "auto")]
    sizes = [(B, L) for L in counts_of(length) for B in counts_of(batch)]
    model = build(models[0], dtype, device, layers)
    count = sum(parameter.numel() for parameter in model.parameters())
    command, date = shlex.join(["moetor", *sys.argv[1:]]), datetime.now(UTC).isoformat(timespec="seconds")
    word = str(dtype).removeprefix("torch.")
    facts = command, commit(), date, describe_machine(device)
    report = ModelReport(*facts, Path(models[0]).resolve().name, word, model.config.num_hidden_layers, count)
    line(out, f"{report.machine['device']}, commit {report.commit}; {count / 1e9:.2f} billion random parameters; ms")
    folder.mkdir(parents=True, exist_ok=True)
    with progress(2 * len(sizes)) as advance:
        interrupted = False
        try:
            for cell in run_model(model, sizes, implementations, modes, report, seconds, first_seconds, budget):
                line(out, _words(cell))
                _save(report, folder, json)
                advance(f"{cell.phase}, batch {cell.batch}, length {cell.length}")
        except KeyboardInterrupt:
            interrupted = True
            report.left_out.append("what comes after the last cell: interrupted")
    _save(report, folder, json)
    for text in report.left_out:
        line(err, f"not run: {text}")
    line(out, f"{len(report.cells)} of {2 * len(sizes)} cells in {folder}")
    return interrupted


def _save(report: ModelReport, folder: Path, json: Path | None) -> None:
    for path in (folder / "results.json", json):
        if path is not None:
            report.save(path)
    (folder / "page.md").write_text(model_page(report), encoding="utf-8")


def _words(cell: ModelCell) -> str:
    parts = [f"{cell.phase}, batch {cell.batch}, length {cell.length}"]
    for row in cell.rows:
        name = row.implementation if row.mode == "call" else f"{row.implementation}, {row.mode}"
        result = f"{row.time.median_us / 1e3:.2f}" if row.time else f"{row.status.upper()}: {row.reason}"
        parts.append(f"{name} {result}")
    return " | ".join(parts)
