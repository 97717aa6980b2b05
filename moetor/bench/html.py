"""A report as one HTML file: plots of µs, TFLOP/s and share of the roof over T, the tables, and what they depend on.

It holds all that it shows: no script, no font, no picture from elsewhere.
"""

from collections.abc import Callable, Iterator
from html import escape

from .measure import Timing
from .page import METHOD, header, label, line, reasons, sizes
from .report import CellResult, Report
from .svg import COLORS, Line, Point, plot

# of a cell and a time: title of the plot, value, logarithmic, end of the axis
_Value = Callable[[CellResult, float], float]
_PLOTS: tuple[tuple[str, _Value, bool, float | None], ...] = (
    ("µs", lambda cell, us: us, True, None),
    ("TFLOP/s, useful", lambda cell, us: cell.flops / us / 1e6, True, None),
    ("% of this machine's roof", lambda cell, us: 100 * cell.floor_us / us, False, None),
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --rule: #d8dee4; --paper: #fff; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa4ae; --rule: #30363d; --paper: #0d1117; --band: #161b22; }
}
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1280px; margin: 2em auto; padding: 0 1em; }
h2 { margin-top: 2em; border-bottom: 1px solid var(--rule); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1em; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: flex; flex-wrap: wrap; gap: 8px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg text.title { font-weight: 600; font-size: 12px; fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; }
.legend span { margin-right: 1.4em; white-space: nowrap; } .legend i { font-style: normal; font-weight: 700; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12.5px; }
td, th { padding: 2px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { position: sticky; top: 0; background: var(--band); } .text { text-align: left; }
tr.best td { background: var(--band); font-weight: 600; } .no { color: var(--soft); }
"""


def html(report: Report, title: str = "One layer of experts") -> str:
    """The file's text."""
    names = list(dict.fromkeys(row.candidate for cell in report.cells for row in cell.rows))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    parts = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">']
    parts += ['<meta name="viewport" content="width=device-width">', f"<title>moetor bench: {escape(title)}</title>"]
    # whatever opens it: nothing is fetched
    parts += ["""<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""]
    parts += [f"<style>{_STYLE}</style></head><body>", f"<h1>{escape(title)}</h1>", *_facts(report)]
    for name, cells in report.groups().items():
        parts += _group(name, cells, colors)
    if why := list(reasons(report)):
        parts += ["<h2>Why there is no time</h2><ul>"]
        parts += [f"<li><b>{escape(who)}</b> {escape(reason)} ({escape(where)})</li>" for who, reason, where in why]
        parts += ["</ul>"]
    if report.left_out:
        parts += ["<h2>Not run</h2><ul>", *(f"<li>{escape(text)}</li>" for text in report.left_out), "</ul>"]
    parts += ["<h2>How to read it</h2>", *(f"<p>{escape(text.replace('**', ''))}</p>" for text in METHOD if text)]
    return "\n".join([*parts, "</body></html>", ""])


def _facts(report: Report) -> Iterator[str]:
    yield "<dl>"
    for name, value in header(report):
        if value:
            yield f"<dt>{escape(name)}</dt><dd>{escape(value.strip('`'))}</dd>"
    yield "</dl>"


def _group(name: str, cells: list[CellResult], colors: dict[str, str]) -> Iterator[str]:
    yield f"<h2>{escape(name)}</h2><p>{escape(cells[0].shape.model)}: {escape(sizes(cells[0].shape))}</p>"
    modes = list(dict.fromkeys(mode for cell in cells for mode in cell.modes))
    for mode in modes:
        yield f"<h3>{escape(mode)}</h3>"
        yield from _legend(cells, mode, colors)
        yield '<div class="plots">'
        for title, value, log_y, ceiling in _PLOTS:
            yield plot(f"{title}, {mode}", list(_lines(cells, mode, value, colors)), log_y, ceiling)
        yield "</div>"
    yield from _table(cells, modes)


def _legend(cells: list[CellResult], mode: str, colors: dict[str, str]) -> Iterator[str]:
    peers = {row.candidate: row.peer for cell in cells for row in cell.rows if mode in row.times}
    entries = [
        f'<span><i style="color:{colors[n]}">{"■" if p else "●"}</i> {escape(n)}</span>' for n, p in peers.items()
    ]
    yield f'<p class="legend">{"".join(entries)}<span><i>─</i> floor</span></p>'


def _lines(cells: list[CellResult], mode: str, value: _Value, colors: dict[str, str]) -> Iterator[Line]:
    for name, color in colors.items():
        found = [(c, row) for c in cells for row in c.rows if row.candidate == name and mode in row.times]
        if found:
            yield Line(name, color, [_point(c, row.times[mode], value, name) for c, row in found], found[0][1].peer)
    floor = [Point(c.tokens, v := value(c, c.floor_us), v, v, "floor") for c in cells if c.floor_us]
    yield Line("floor", "#888888", floor, marks=False)


def _point(cell: CellResult, timing: Timing, value: _Value, name: str) -> Point:
    y, first, third = (value(cell, us) for us in (timing.median_us, timing.q1_us, timing.q3_us))
    words = f"{name}, {label(cell)}: {timing.median_us:.1f} µs ({timing.q1_us:.1f}–{timing.q3_us:.1f})"
    return Point(cell.tokens, y, min(first, third), max(first, third), words)


def _table(cells: list[CellResult], modes: list[str]) -> Iterator[str]:
    titles = ["T", "cell", "hit", "floor µs", "candidate", *(f"{mode} µs" for mode in modes)]
    titles += ["GB/s", "TFLOP/s", "% of roof", "× floor", "extra MiB", "error"]
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f'<th class="{"text" if title in ("cell", "candidate") else ""}">{title}</th>' for title in titles)
    yield "</tr></thead><tbody>"
    for cell in cells:
        fastest = min((row.best.median_us for row in cell.rows if row.best), default=None)
        for row in cell.rows:
            kind = "no" if row.best is None else "best" if row.best.median_us == fastest else ""
            columns = line(cell, row, modes)
            cells_text = (
                f'<td class="{"text" if i in (1, 4) else ""}">{escape(c)}</td>' for i, c in enumerate(columns)
            )
            yield f'<tr class="{kind}">{"".join(cells_text)}</tr>'
    yield "</tbody></table></div>"
