"""What `moetor bench` shows while it runs and when it is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..bench.report import Report
from .terminal import err, out


def line(console: Console, text: str) -> None:
    """The text as it is, one line however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar with an estimate, where somebody is looking; gives a function that is told what is done."""
    # results are printed above the bar where both go to one terminal
    console = out if out.is_terminal else err
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )
    with bar:
        task = bar.add_task("bench", total=total)
        yield lambda done: bar.update(task, advance=1, description=done)


def fastest(report: Report) -> Iterator[Table]:
    """For each group of cells who is fastest, of ours and of the peers."""
    for group, cells in report.groups().items():
        table = Table(title=group, title_justify="left")
        for name in ("T", "mode", "floor µs", "fastest of ours", "µs", "× floor", "fastest peer", "µs", "peer / ours"):
            table.add_column(name, justify="left" if "fastest" in name or name == "mode" else "right")
        for cell in cells:
            for mode in cell.modes:
                ours, peer = cell.fastest(mode, peer=False), cell.fastest(mode, peer=True)
                own, theirs = (row.times[mode] if row else None for row in (ours, peer))
                table.add_row(
                    str(cell.tokens),
                    mode,
                    f"{cell.floor_us:.1f}",
                    ours.candidate if ours else "",
                    f"{own.median_us:.1f}" if own else "",
                    f"{cell.times_floor(own):.2f}" if own else "",
                    peer.candidate if peer else "",
                    f"{theirs.median_us:.1f}" if theirs else "",
                    f"{theirs.median_us / own.median_us:.2f}" if own and theirs else "",
                )
        yield table
