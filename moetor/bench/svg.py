"""Lines over T as SVG text, drawn here so that a report needs no library, no script and no request."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 40
# Okabe and Ito's, told apart with any kind of sight, without the yellow that white paper swallows; then Tol's
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f3c8d"),
    *("#117733", "#882255", "#999933", "#332288", "#aa4499"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One mark, with its quartiles and the words that a pointer over it shows."""

    x: float
    y: float
    low: float
    high: float
    words: str


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of x; dashed for what is not ours."""

    name: str
    color: str
    points: Sequence[Point]
    dashed: bool = False
    marks: bool = True


def plot(title: str, lines: Sequence[Line], log_y: bool = True, ceiling: float | None = None) -> str:
    """One picture.

    Args:
        log_y: else from 0.
        ceiling: the end of a y axis that is not logarithmic.
    """
    points = [point for line in lines for point in line.points]
    xs = sorted({point.x for point in points})
    x_of = _scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT, True)
    low, high = min(p.low for p in points), max(p.high for p in points)
    low, high = (low / 1.15, high * 1.15) if log_y else (0.0, ceiling or high * 1.05)
    y_of = _scale(low, high, HEIGHT - BOTTOM, TOP, log_y)
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
            *_grid(xs, x_of, _log_ticks(low, high) if log_y else _ticks(high), y_of),
            *(part for line in lines for part in _line(line, x_of, y_of)),
            "</svg>",
        ]
    )


class _scale:
    """Where a value lies between two coordinates."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool) -> None:
        self._map = math.log if log else float
        self._low, self._start = self._map(low), start
        span = self._map(high) - self._low
        self._slope = (end - start) / span if span else 0.0
        if not span:
            self._start = (start + end) / 2

    def __call__(self, value: float) -> float:
        return round(self._start + (self._map(value) - self._low) * self._slope, 1)


def _line(line: Line, x_of: _scale, y_of: _scale) -> Iterator[str]:
    dash = ' stroke-dasharray="5 3"' if line.dashed else ""
    places = [(x_of(point.x), y_of(point.y)) for point in line.points]
    path = " ".join(f"{x},{y}" for x, y in places)
    yield f'<g stroke="{line.color}" fill="{line.color}">'
    yield f'<polyline points="{path}" fill="none" stroke-width="1.6"{dash}/>'
    for point, (x, y) in zip(line.points if line.marks else (), places, strict=False):
        if point.high > point.low:
            yield f'<line x1="{x}" x2="{x}" y1="{y_of(point.low)}" y2="{y_of(point.high)}" stroke-width="1"/>'
        mark = f'<rect x="{x - 3}" y="{y - 3}" width="6" height="6">' if line.dashed else ""
        end = "rect" if mark else "circle"
        yield f'{mark or f"""<circle cx="{x}" cy="{y}" r="3.2">"""}<title>{escape(point.words)}</title></{end}>'
    yield "</g>"


def _grid(xs: Sequence[float], x_of: _scale, ticks: Sequence[float], y_of: _scale) -> Iterator[str]:
    for tick in ticks:
        y = y_of(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{tick:.12g}</text>'
    last = -math.inf
    for x in xs:
        place = x_of(x)
        yield f'<line class="grid" x1="{place}" x2="{place}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        if place - last >= 30:
            yield f'<text x="{place}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:.12g}</text>'
            last = place
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">T, tokens</text>'


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 in each decade, or decades alone where those would be many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leading = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [digit * 10.0**power for power in decades for digit in leading if low <= digit * 10.0**power <= high]


def _ticks(high: float) -> list[float]:
    """From 0 by a round step.

    >>> _ticks(100), _ticks(7)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.0, 2.0, 4.0, 6.0])
    """
    step = 10.0 ** math.floor(math.log10(high / 4))
    step = next(factor * step for factor in (1, 2, 5, 10) if factor * step * 6 >= high)
    return [round(i * step, 12) for i in range(int(high / step + 1e-9) + 1)]
