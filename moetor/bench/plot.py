"""µs over T, one panel a shape, as a PNG; without matplotlib there is no picture and the reason is said."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .report import CellResult, Report


def why_no_plot() -> str | None:
    """The reason there can be no picture here, or None."""
    return None if importlib.util.find_spec("matplotlib") else "needs matplotlib: pip install 'moetor[plots]'"


def plot(report: Report, path: Path) -> None:
    """Write the picture: graph times where there are any, else call times (dashed), and the floor."""
    # a figure of its own and no pyplot: no display is looked for, no state is left
    Figure: Any = importlib.import_module("matplotlib.figure").Figure
    panels = report.groups()
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    names = list(dict.fromkeys(row.candidate for cell in report.cells for row in cell.rows))
    for axes, (title, cells) in zip(grid, panels.items(), strict=False):
        _panel(axes, title, cells, names)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{report.machine.get('device')} · moetor {report.commit} · {report.date[:10]}", fontsize=9)
    figure.savefig(path, dpi=130)


def _panel(axes: Any, title: str, cells: list[CellResult], names: list[str]) -> None:
    for index, name in enumerate(names):
        rows = [(cell, row) for cell in cells for row in cell.rows if row.candidate == name and row.best]
        if not rows:
            continue
        timings = [row.best for _, row in rows if row.best]
        low = [timing.median_us - timing.q1_us for timing in timings]
        high = [timing.q3_us - timing.median_us for timing in timings]
        axes.errorbar(
            [cell.tokens for cell, _ in rows],
            [timing.median_us for timing in timings],
            yerr=[low, high],
            label=name,
            color=f"C{index % 10}",
            marker="s" if rows[0][1].peer else "o",
            linestyle="-" if any("graph" in row.times for _, row in rows) else "--",
            markersize=4,
            linewidth=1.2,
        )
    axes.plot([cell.tokens for cell in cells], [cell.floor_us for cell in cells], "k:", label="floor")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="T, tokens", ylabel="µs", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=7)
