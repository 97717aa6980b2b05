"""Cells in a row: make, check, time, and keep what there is, whatever goes wrong."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from .cases import Cell, Draw, make_draws
from .guard import DeviceLost, Failure, guarded
from .measure import Call, check, extra_bytes, time_alternating, wrong
from .peers import Bound, Candidate
from .reference import reference
from .report import CellResult, Report, Row
from .roofs import cost_of
from .samplers import COMPILE_MODES, CallSampler, GraphSampler, calls_of, compiled_calls

S = TypeVar("S", CallSampler, GraphSampler)


@dataclass(slots=True)
class Settings:
    """How a run goes.

    Attributes:
        modes: of `samplers.MODES`; "graph" on CUDA only.
        cell_s: seconds of timing for a cell and mode, all candidates together.
        first_s: most that a candidate's check may take, compilation included. A candidate that
            took longer is not asked again for the same shape.
        budget_s: no cell is begun after this many seconds; None: no bound.
        gave_up: (shape, candidate) that took too long.
    """

    device: torch.device
    modes: Sequence[str] = ("call",)
    cell_s: float = 1.0
    first_s: float = 120.0
    budget_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    gave_up: dict[tuple[str, str], Failure] = field(default_factory=dict)


def run(
    cells: Iterable[Cell], candidates: Sequence[Candidate], settings: Settings, report: Report
) -> Iterator[CellResult]:
    """Run the cells, add each to the report when it is done, and yield it.

    Cells that the budget leaves out, or that come after the device was lost, are named in `report.left_out`.
    """
    start = settings.clock()
    lost: str | None = None
    for cell in cells:
        spent = settings.clock() - start
        if lost is None and settings.budget_s is not None and spent >= settings.budget_s:
            report.left_out.append(f"{cell}: the budget of {settings.budget_s:g} s was spent")
            continue
        if lost is not None:
            report.left_out.append(f"{cell}: {lost}")
            continue
        result = CellResult.of(cell)
        try:
            left_s = None if settings.budget_s is None else settings.budget_s - spent
            with torch.set_grad_enabled(cell.training):
                _run_cell(cell, candidates, settings, report, result, left_s)
        except DeviceLost as error:
            lost = str(error)
            known = {row.candidate for row in result.rows}
            for row in result.rows:
                if row.status == "ok" and not row.times:
                    row.status, row.reason = "failed", lost
            result.rows += [_row(c, Failure("failed", lost)) for c in candidates if c.name not in known]
        report.cells.append(result)
        yield result


def _row(candidate: Candidate, failure: Failure | None = None) -> Row:
    row = Row(candidate.name, candidate.peer)
    if failure is not None:
        row.status, row.reason = failure.status, failure.reason
    return row


def _run_cell(
    cell: Cell,
    candidates: Sequence[Candidate],
    settings: Settings,
    report: Report,
    result: CellResult,
    left_s: float | None,
) -> None:
    made = guarded(lambda: _make(cell, settings.device))
    if isinstance(made, Failure):
        result.rows += [_row(candidate, made) for candidate in candidates]
        return
    draws, references = made
    cost, result.hit = cost_of(draws)
    result.draws, result.layers = len(draws), len({id(draw.weights) for draw in draws})
    result.flops, result.weight_bytes, result.activation_bytes = cost.flops, cost.weight_bytes, cost.activation_bytes
    result.floor_us = cost.floor_us(report.roofs.bytes_per_s, report.roofs.flops_per_s)

    begin, start = {}, settings.clock()
    for candidate in candidates:
        limit_s = settings.first_s
        if left_s is not None:
            # a little is left to those that come after a slow compiler
            limit_s = max(5.0, min(limit_s, left_s - (settings.clock() - start)))
        row, forwards = _check(candidate, draws, references, settings, limit_s)
        result.rows.append(row)
        if forwards is not None:
            begin[row.candidate] = (candidate, row, forwards)

    for mode in settings.modes:
        samplers: dict[str, Callable[[], float]] = {}
        if mode in COMPILE_MODES:
            torch.compiler.reset()  # what an earlier cell or mode compiled counts against a limit
        for name, (candidate, row, bound) in begin.items():
            sampler = _sampler(mode, candidate, draws, bound, references, settings)
            if isinstance(sampler, Failure):
                row.no_time[mode] = sampler.reason
                if sampler.status == "wrong":
                    # wrong in one mode is no backend to be timed in another
                    row.status, row.reason, row.times = "wrong", sampler.reason, {}
            elif row.status == "ok":
                samplers[name] = sampler
        for name, timing in time_alternating(samplers, len(draws), settings.cell_s).items():
            row = begin[name][1]
            if isinstance(timing, Failure):
                row.no_time[mode] = timing.reason
            else:
                row.times[mode] = timing


def _make(cell: Cell, device: torch.device) -> tuple[list[Draw], list[list[Tensor]]]:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # so that the number of layers is not set by what the last cell left
    draws = make_draws(cell, device)
    # gradients of one draw are checked: a stack of them in float64 takes four times the memory of the layer
    return draws, [reference(draw, gradients=cell.training and i == 0) for i, draw in enumerate(draws)]


def _check(
    candidate: Candidate, draws: list[Draw], references: list[list[Tensor]], settings: Settings, limit_s: float
) -> tuple[Row, list[Bound] | None]:
    """The candidate's row so far, and what it runs if that is right."""
    key = (draws[0].cell.shape.name, candidate.name)
    reasons = [candidate.why_not(draws[0], mode) for mode in settings.modes]
    if all(reasons):
        return _row(candidate, Failure("refused", reasons[0] or "")), None
    if key in settings.gave_up:
        return _row(candidate, settings.gave_up[key]), None

    row = _row(candidate)

    def attempt() -> tuple[list[Bound], list[Call], float]:
        bound = [candidate.bind(draw) for draw in draws]
        calls = calls_of(draws, bound)
        start = time.perf_counter()
        calls[0]()
        if settings.device.type == "cuda":
            torch.cuda.synchronize()
        row.first_call_s = round(time.perf_counter() - start, 3)
        return bound, calls, check(calls, references, draws)

    checked = guarded(attempt, limit_s)
    if isinstance(checked, Failure):
        if checked.status == "timed out":
            settings.gave_up[key] = checked
        row.status, row.reason = checked.status, checked.reason
        return row, None
    bound, calls, error = checked
    row.error = error if math.isfinite(error) else None  # JSON has no infinity
    if failure := wrong(error, draws[0].cell):
        row.status, row.reason = failure.status, failure.reason
        return row, None
    peak = guarded(lambda: extra_bytes(calls[0], settings.device))
    row.extra_bytes = None if isinstance(peak, Failure) else peak
    return row, bound


def _sampler(
    mode: str,
    candidate: Candidate,
    draws: list[Draw],
    bound: list[Bound],
    references: list[list[Tensor]],
    settings: Settings,
) -> Callable[[], float] | Failure:
    cell = draws[0].cell
    if reason := candidate.why_not(draws[0], mode):
        return Failure("refused", reason)
    if mode == "call":
        return CallSampler(calls_of(draws, bound), settings.device)
    if mode == "graph":
        return _checked(
            lambda: GraphSampler(calls_of(draws, bound)),
            lambda graph: graph.error(references),
            cell,
            "a replayed graph's result",
        )
    return _checked(
        lambda: CallSampler(compiled_calls(mode, draws, bound), settings.device),
        lambda compiled: check(compiled.calls, references, draws),
        cell,
        "a compiled call's result",
        settings.first_s,
    )


def _checked(
    make: Callable[[], S], error_of: Callable[[S], float], cell: Cell, where: str, limit_s: float | None = None
) -> S | Failure:
    """What is made, if its results are right."""

    def attempt() -> tuple[S, float]:
        made = make()
        return made, error_of(made)

    attempted = guarded(attempt, limit_s)
    if isinstance(attempted, Failure):
        return attempted
    made, error = attempted
    return wrong(error, cell, where) or made
