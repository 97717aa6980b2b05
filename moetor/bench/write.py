"""Everything that a run leaves in its folder, made from its report."""

from collections.abc import Iterator
from pathlib import Path

from .html import html
from .page import page
from .plot import plot, why_no_plot
from .report import Report
from .table import save_csv


def save(report: Report, folder: Path, json: Path | None = None) -> None:
    """What is kept after every cell: the data, and a page of them."""
    report.save(folder / "results.json")
    if json is not None:
        report.save(json)
    (folder / "page.md").write_text(page(report), encoding="utf-8")
    (folder / "report.html").write_text(html(report), encoding="utf-8")


def save_all(report: Report, folder: Path, json: Path | None = None, csv: Path | None = None) -> Iterator[str]:
    """All files of a run that has ended; says which one could not be made."""
    save(report, folder, json)
    for path in (folder / "results.csv", csv):
        if path is not None:
            save_csv(report, path)
    if not report.cells:
        return
    if reason := why_no_plot():
        yield f"no plot.png: {reason}"
        return
    plot(report, folder / "plot.png")
    (folder / "page.md").write_text(page(report, plot="plot.png"), encoding="utf-8")
