"""A report as a page of Markdown: the machine, who is ahead where, every candidate in every cell, and every reason.

Letters: T tokens, E experts, K experts per token, H hidden size, I intermediate size.
"""

from collections.abc import Iterator
from itertools import groupby

from .measure import Timing
from .report import CellResult, Report, Row


def page(report: Report, title: str = "One layer of experts, forward", plot: str | None = None) -> str:
    """The page; `plot` is the file name of a picture beside it."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in _header(report) if value]
    lines += ["", *_METHOD, ""]
    if plot:
        lines += [f"![µs over T]({plot})", ""]
    lines += ["## Who is ahead", "", *_summary(report), ""]
    for name, cells in groupby(report.cells, key=lambda cell: cell.shape.name):
        lines += [*_shape(name, list(cells)), ""]
    lines += _reasons(report)
    if report.left_out:
        lines += ["", "## Not run", "", *(f"- {line}" for line in report.left_out)]
    return "\n".join(lines).rstrip() + "\n"


def one_line(cell: CellResult) -> str:
    """A cell for the terminal: each candidate's call / graph in µs, or its status."""
    parts = [f"{cell.shape.name} T={cell.tokens} {cell.routing} floor {cell.floor_us:.1f}"]
    for row in cell.rows:
        if row.status == "ok":
            parts.append(f"{row.candidate} {_short(row.call)}/{_short(row.graph)}")
        elif row.status != "refused":
            parts.append(f"{row.candidate} {row.status.upper()}: {row.reason}")
    return " | ".join(parts)


# what every reader has to know to read the table
_METHOD = (
    "Every result was within tolerance of a float64 reference before its candidate was timed, and what a graph's"
    " replay writes was checked as well; memory was filled with NaN first. Medians, quartiles in brackets, candidates"
    " in turn round by round.",
    "",
    "**call**: launched from Python, calls back to back, from idle to idle by the host's clock. **graph**: replay of"
    " a CUDA graph that holds one call of each draw. **floor**: the larger of bytes (weights of the experts hit,"
    " activations once) and useful FLOPs (6·T·K·H·I) over this machine's measured roofs. GB/s, TFLOP/s, % of roof and"
    " × floor are of the graph where there is one, else of the call. **extra**: peak memory of a call beyond its"
    " inputs, result included. Draws go round among several layers' weights, so that these come from memory.",
)


def _header(report: Report) -> Iterator[tuple[str, str | None]]:
    yield "date", report.date
    yield "commit", report.commit
    yield "command", f"`{report.command}`"
    yield from report.machine.items()
    roofs = report.roofs
    yield "copy, measured", f"{roofs.bytes_per_s / 1e9:.0f} GB/s"
    yield f"{roofs.dtype} product, measured", f"{roofs.flops_per_s / 1e12:.2f} TFLOP/s"


def _summary(report: Report) -> Iterator[str]:
    yield (
        "| shape | dtype | routing | T | floor µs | mode | fastest of ours | µs | × floor"
        " | fastest peer | µs | peer / ours |"
    )
    yield "|---|---|---|--:|--:|---|---|--:|--:|---|--:|--:|"
    for cell in report.cells:
        modes = [mode for mode in ("graph", "call") if any(getattr(row, mode) for row in cell.rows)]
        for mode in modes or ["call"]:
            ours, peer = cell.fastest(mode, peer=False), cell.fastest(mode, peer=True)
            own, theirs = (getattr(row, mode) if row else None for row in (ours, peer))
            ratio = f"**{theirs.median_us / own.median_us:.2f}**" if own and theirs else "–"
            yield (
                f"| {cell.shape.name} | {cell.dtype} | {cell.routing} | {cell.tokens} | {cell.floor_us:.1f} | {mode}"
                f" | {ours.candidate if ours else '–'} | {_short(own)} | {_ratio(cell, own)}"
                f" | {peer.candidate if peer else '–'} | {_short(theirs)} | {ratio} |"
            )


def _shape(name: str, cells: list[CellResult]) -> Iterator[str]:
    shape = cells[0].shape
    extras = [word for word in ("bias", "interleaved", "transposed", "fp32_routing") if getattr(shape, word)]
    sizes = f"E {shape.experts}, K {shape.top_k}, H {shape.hidden}, I {shape.intermediate}, gate {shape.gate}"
    yield f"## {name}: {shape.model}"
    yield ""
    yield ", ".join([sizes, *extras])
    yield ""
    yield (
        "| T | routing | hit | floor µs | candidate | call µs | graph µs | GB/s | TFLOP/s | % of roof | × floor"
        " | extra MiB | error |"
    )
    yield "|--:|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for cell in cells:
        for row in cell.rows:
            yield _line(cell, row)


def _line(cell: CellResult, row: Row) -> str:
    start = f"| {cell.tokens} | {cell.routing} | {cell.hit:.1f} | {cell.floor_us:.1f} | {row.candidate}"
    if row.status != "ok":
        return f"{start} | {row.status} | | | | | | | {_error(row)} |"
    timing = row.best
    if timing is None:
        rates = "– | – | – | –"
    else:
        share = 100 / cell.times_floor(timing)
        rates = f"{cell.gb_per_s(timing):.3g} | {cell.tflop_per_s(timing):.3g} | {share:.0f} | {_ratio(cell, timing)}"
    extra = "–" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"
    return f"{start} | {_spread(row.call)} | {_spread(row.graph)} | {rates} | {extra} | {_error(row)} |"


def _reasons(report: Report) -> Iterator[str]:
    """Why there is no time, once for all cells that share the reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for cell in report.cells:
        label = f"{cell.shape.name} T={cell.tokens} {cell.routing}"
        for row in cell.rows:
            reasons = [f"{row.status}: {row.reason}"] if row.reason else []
            pairs = (("call", row.call_reason), ("graph", row.graph_reason))
            reasons += [f"no {mode}: {reason}" for mode, reason in pairs if reason and reason != row.reason]
            for reason in reasons:
                where.setdefault((row.candidate, reason), []).append(label)
    if where:
        yield "## Why there is no time"
        yield ""
    for (candidate, reason), cells in where.items():
        cells_text = "all cells" if len(cells) == len(report.cells) else ", ".join(cells)
        yield f"- **{candidate}** {reason} ({cells_text})"


def _spread(timing: Timing | None) -> str:
    if timing is None:
        return "–"
    return f"{_short(timing)} ({_number(timing.q1_us)}–{_number(timing.q3_us)})"


def _short(timing: Timing | None) -> str:
    return "–" if timing is None else _number(timing.median_us)


def _number(value_us: float) -> str:
    return f"{value_us:.1f}" if value_us < 1000 else f"{value_us:.0f}"


def _ratio(cell: CellResult, timing: Timing | None) -> str:
    return "–" if timing is None else f"{cell.times_floor(timing):.2f}"


def _error(row: Row) -> str:
    return "–" if row.error is None else f"{row.error:.1e}"
