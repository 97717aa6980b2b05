"""A report as CSV: one line a candidate, cell and mode, for spreadsheets and data frames."""

import csv
from pathlib import Path

from .report import Report

COLUMNS = (
    *("shape", "E", "K", "H", "I", "tokens", "dtype", "format", "routing", "training", "candidate", "peer", "status"),
    *("mode", "median_us", "q1_us", "q3_us", "samples", "gb_per_s", "tflop_per_s", "floor_us", "extra_bytes", "error"),
    "reason",
)


def save_csv(report: Report, path: Path) -> None:
    """Write one line a time, and one with empty times and the reason for a candidate that has none."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for cell in report.cells:
            shape = cell.shape
            start = [shape.name, shape.experts, shape.top_k, shape.hidden, shape.intermediate, cell.tokens]
            start += [cell.dtype, cell.format, cell.routing, cell.training]
            for row in cell.rows:
                who = [*start, row.candidate, row.peer, row.status]
                end = [round(cell.floor_us, 3), row.extra_bytes, row.error]
                for mode, time in row.times.items():
                    rates = [round(cell.gb_per_s(time), 2), round(cell.tflop_per_s(time), 4)]
                    times = [time.median_us, time.q1_us, time.q3_us, time.samples]
                    writer.writerow([*who, mode, *times, *rates, *end, None])
                for mode, reason in row.no_time.items() if row.status == "ok" else [("", row.reason)]:
                    writer.writerow([*who, mode, *[None] * 6, *end, reason])
