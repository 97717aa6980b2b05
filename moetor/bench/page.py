"""A report as a page of Markdown: the machine, who is ahead where, every candidate in every cell, and every reason.

Letters: T tokens, E experts, K experts per token, H hidden size, I intermediate size.
"""

from collections.abc import Iterator
from itertools import groupby

from .measure import Timing
from .report import CellResult, Report, Row
from .shapes import Shape


def page(report: Report, title: str = "One layer of experts", plot: str | None = None) -> str:
    """The page; `plot` is the file name of a picture beside it."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in header(report) if value]
    lines += ["", *METHOD, ""]
    if plot:
        lines += [f"![µs over T]({plot})", ""]
    lines += ["## Who is ahead", "", *_summary(report), ""]
    for name, cells in groupby(report.cells, key=lambda cell: cell.shape.name):
        lines += [*_shape(name, list(cells), report.modes), ""]
    if why := list(reasons(report)):
        lines += ["## Why there is no time", ""]
        lines += [f"- **{candidate}** {reason} ({cells})" for candidate, reason, cells in why]
    if report.left_out:
        lines += ["", "## Not run", "", *(f"- {line}" for line in report.left_out)]
    return "\n".join(lines).rstrip() + "\n"


def one_line(cell: CellResult) -> str:
    """A cell for the terminal: each candidate's µs by mode, or its status."""
    parts = [f"{label(cell)} floor {cell.floor_us:.1f}"]
    for row in cell.rows:
        if row.status == "ok":
            times = "/".join(_short(row.times.get(mode)) for mode in cell.modes)
            parts.append(f"{row.candidate} {times or '–'}")
        elif row.status != "refused":
            parts.append(f"{row.candidate} {row.status.upper()}: {row.reason}")
    return " | ".join(parts)


def label(cell: CellResult) -> str:
    """The cell in words: its group and T."""
    return f"{cell.group} T={cell.tokens}"


# what every reader has to know to read the table
METHOD = (
    "Every result was within tolerance of a float64 reference before its candidate was timed, and what a graph's"
    " replay or a compiled call writes was checked as well, in training the gradients too; memory was filled with NaN"
    " first. Medians, quartiles in brackets, candidates in turn round by round.",
    "",
    "**call**: launched from Python, calls back to back, from idle to idle by the host's clock. **graph**: replay of"
    " a CUDA graph that holds one call of each draw. **compile** and the rest: a call through torch.compile in that"
    " mode. **training**: forward and backward, with every gradient. **floor**: the larger of bytes (weights of the"
    " experts hit, activations once) and useful FLOPs (6·T·K·H·I), in training both three times, over this machine's"
    " measured roofs. GB/s, TFLOP/s, % of roof and × floor are of the graph where there is one, else of the first"
    " time. **extra**: peak memory of a call beyond its inputs, result included. Draws go round among several layers'"
    " weights, so that these come from memory.",
)


def header(report: Report) -> Iterator[tuple[str, str | None]]:
    """What the numbers depend on, by name."""
    yield "date", report.date
    yield "commit", report.commit
    yield "command", f"`{report.command}`"
    yield from report.machine.items()
    roofs = report.roofs
    yield "copy, measured", f"{roofs.bytes_per_s / 1e9:.0f} GB/s"
    yield f"{roofs.dtype} product, measured", f"{roofs.flops_per_s / 1e12:.2f} TFLOP/s"


def _summary(report: Report) -> Iterator[str]:
    yield "| cell | T | floor µs | mode | fastest of ours | µs | × floor | fastest peer | µs | peer / ours |"
    yield "|---|--:|--:|---|---|--:|--:|---|--:|--:|"
    for cell in report.cells:
        for mode in cell.modes or ["call"]:
            ours, peer = cell.fastest(mode, peer=False), cell.fastest(mode, peer=True)
            own, theirs = (row.times[mode] if row else None for row in (ours, peer))
            ratio = f"**{theirs.median_us / own.median_us:.2f}**" if own and theirs else "–"
            yield (
                f"| {cell.group} | {cell.tokens} | {cell.floor_us:.1f} | {mode}"
                f" | {ours.candidate if ours else '–'} | {_short(own)} | {_ratio(cell, own)}"
                f" | {peer.candidate if peer else '–'} | {_short(theirs)} | {ratio} |"
            )


def _shape(name: str, cells: list[CellResult], modes: list[str]) -> Iterator[str]:
    yield f"## {name}: {cells[0].shape.model}"
    yield ""
    yield sizes(cells[0].shape)
    yield ""
    columns = ["T", "cell", "hit", "floor µs", "candidate", *(f"{mode} µs" for mode in modes), "GB/s", "TFLOP/s"]
    columns += ["% of roof", "× floor", "extra MiB", "error"]
    yield f"| {' | '.join(columns)} |"
    yield "|--:|---|--:|--:|---|" + "--:|" * (len(columns) - 5)
    for cell in cells:
        for row in cell.rows:
            yield f"| {' | '.join(line(cell, row, modes))} |"


def sizes(shape: Shape) -> str:
    """One layer in words."""
    extras = [word for word in ("bias", "interleaved", "transposed", "fp32_routing") if getattr(shape, word)]
    text = f"E {shape.experts}, K {shape.top_k}, H {shape.hidden}, I {shape.intermediate}, gate {shape.gate}"
    return ", ".join([text, *extras])


def line(cell: CellResult, row: Row, modes: list[str]) -> list[str]:
    """The columns of one row of a table."""
    group = cell.group.removeprefix(cell.shape.name).strip()
    start = [str(cell.tokens), group, f"{cell.hit:.1f}", f"{cell.floor_us:.1f}", row.candidate]
    if row.status != "ok":
        return [*start, row.status, *[""] * (len(modes) + 4), _error(row)]
    times = [_spread(row.times.get(mode)) for mode in modes]
    timing = row.best
    if timing is None:
        rates = ["–"] * 4
    else:
        share = 100 / cell.times_floor(timing)
        rates = [f"{cell.gb_per_s(timing):.3g}", f"{cell.tflop_per_s(timing):.3g}"]
        rates += [f"{share:.0f}", _ratio(cell, timing)]
    extra = "–" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"
    return [*start, *times, *rates, extra, _error(row)]


def reasons(report: Report) -> Iterator[tuple[str, str, str]]:
    """Why there is no time, once for all cells that share the reason: candidate, reason, cells."""
    where: dict[tuple[str, str], list[str]] = {}
    for cell in report.cells:
        for row in cell.rows:
            words = [f"{row.status}: {row.reason}"] if row.reason else []
            words += [f"no {mode}: {reason}" for mode, reason in row.no_time.items() if reason != row.reason]
            for reason in words:
                where.setdefault((row.candidate, reason), []).append(label(cell))
    for (candidate, reason), cells in where.items():
        yield candidate, reason, "all cells" if len(cells) == len(report.cells) else ", ".join(cells)


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
