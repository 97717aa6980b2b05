"""`moetor doctor`: which backend runs here, for which format and dtype, and why the others do not."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..core.interface import Backend, ExpertsInterface
from .example import DTYPES, LAYOUTS, PLAIN, TRAINING, Example, make_example
from .machine import describe, devices, settings, versions
from .terminal import out

# Rounding stays far below 16 units of it; a wrong layout, gate or scale gives 0.3 and more.
ALLOWED_EPS = 16

STYLES = {"runs": "green", "refused": "yellow", "unavailable": "dim", "wrong": "bold red", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """What one backend says, and does, on one small layer.

    Attributes:
        status: "runs"; "unavailable" (this device or installation) or "refused" (this call), by its own reason;
            "failed" (it raised) or "wrong" (too far from float64), which are bugs.
        error: relative to float64, of the output, or in training of the gradient of hidden_states.
        ran: the backend that a policy chose, else the backend itself.
    """

    backend: str
    device: str
    format: str
    dtype: str
    training: bool
    status: str
    reason: str | None = None
    error: float | None = None
    ran: str | None = None


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Say what runs on this machine and why the rest does not; paste it into a bug report.

    Every backend is asked about, and where it can then runs, a small layer in each dtype on each device. Exits with 1
    if a backend that said it could run raises or is wrong.
    """
    checks = [
        check(ExpertsInterface[name], example)
        for device in devices()
        for example in _examples(device)
        for name in ExpertsInterface.names()
    ]
    report = {
        "versions": versions(),
        "settings": settings(),
        "devices": [describe(device) for device in devices()],
        "backends": {name: ExpertsInterface[name].summary for name in ExpertsInterface.names()},
        "checks": [asdict(check) for check in checks],
    }
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print(report, checks)
    if any(check.status in ("failed", "wrong") for check in checks):
        raise typer.Exit(1)


def _examples(device: torch.device) -> list[Example]:
    """Inference and training in every dtype that the device can hold."""
    examples = []
    for dtype in DTYPES:
        try:
            examples += [make_example(dtype, device, LAYOUTS[name]) for name in (PLAIN, TRAINING)]
        except TypeError:
            continue  # float64 on MPS
    return examples


def check(backend: Backend, example: Example) -> Check:
    """Ask, and run if it may."""
    weights, call = example.weights, example.call
    chosen = backend

    def result(status: str, reason: str | None = None, error: float | None = None) -> Check:
        ran = chosen.name if status == "runs" else None
        device, dtype = str(call.device), str(call.dtype).removeprefix("torch.")
        return Check(backend.name, device, weights.format, dtype, call.needs_grad, status, reason, error, ran)

    if reason := backend.machine_why_not(call.device):
        return result("unavailable", reason)
    if reason := backend.why_not(weights, call):
        return result("refused", reason)
    if backend.choose:
        chosen = backend.choose(weights, call)
    try:
        error = relative_error(chosen, example)
    except Exception as exception:  # whatever it is, it belongs into the report
        return result("failed", f"{type(exception).__name__}: {exception}")
    allowed = ALLOWED_EPS * torch.finfo(call.dtype).eps
    if not error <= allowed:
        # no number for NaN: JSON has none
        known = error if math.isfinite(error) else None
        return result("wrong", f"relative error {error:.1e}, at most {allowed:.1e} is rounding", known)
    return result("runs", error=error)


def relative_error(backend: Backend, example: Example) -> float:
    """Against `eager` in float64 on the CPU; of the output or, in training, of the gradient of hidden_states."""
    training = example.call.needs_grad
    expected = _run(ExpertsInterface["eager"], example.to_float64(), training)
    got = _run(backend, example, training).to(expected)
    return float((got - expected).norm() / expected.norm())


def _run(backend: Backend, example: Example, training: bool) -> Tensor:
    weights, hidden_states, top_k_index, top_k_weights = example.args
    if not training:
        return backend.forward(weights, hidden_states, top_k_index, top_k_weights)
    hidden_states = hidden_states.detach().requires_grad_()
    result = backend.forward(weights, hidden_states, top_k_index, top_k_weights)
    # not of a plain sum, whose constant upstream gradient would hide most mistakes
    (grad,) = torch.autograd.grad(result.square().sum(), hidden_states)
    return grad


def _print(report: dict[str, Any], checks: list[Check]) -> None:
    facts = Table.grid(padding=(0, 2))
    for name, value in (report["versions"] | report["settings"]).items():
        facts.add_row(name, Text(str(value)) if value else Text("none", style="dim"))
    out.print(facts)
    for device in report["devices"]:
        out.print()
        out.print(_table(device, [check for check in checks if check.device == device["device"]]))
    # one line a reason, however many dtypes share it
    reasons = dict.fromkeys((c.backend, c.device, c.reason) for c in checks if c.reason)
    if reasons:
        out.print()
    for backend, place, reason in reasons:
        out.print(Text(f"{backend} on {place}: {reason}"))


def _table(device: dict[str, Any], checks: list[Check]) -> Table:
    memory = f", {device['bytes'] / 2**30:.0f} GiB" if device.get("bytes") else ""
    capability = f", capability {device['capability']}" if device["capability"] else ""
    table = Table(
        title=f"{device['device']}: {device['name']}{capability}{memory}",
        title_justify="left",
        caption="numbers: relative error against float64, the larger of output and gradient",
        caption_justify="left",
    )
    dtypes = list(dict.fromkeys(check.dtype for check in checks))
    table.add_column("backend")
    table.add_column("weights")
    for dtype in dtypes:
        table.add_column(dtype)
    for backend, format in dict.fromkeys((check.backend, check.format) for check in checks):
        cells = [
            _cell([c for c in checks if (c.backend, c.format, c.dtype) == (backend, format, dtype)]) for dtype in dtypes
        ]
        table.add_row(backend, format, *cells)
    return table


def _cell(checks: list[Check]) -> Text:
    """Inference and training in one dtype: the larger error where both run, else what does not."""
    inference, training = checks
    errors = [check.error for check in checks if check.error is not None]
    if inference.status == training.status == "runs":
        return Text(f"{max(errors):.0e}", STYLES["runs"])
    if inference.status == training.status:
        return Text(inference.status, STYLES[inference.status])
    return Text(f"{inference.status}, training {training.status}", STYLES[training.status])
