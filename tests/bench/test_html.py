"""The report that a browser shows: drawn, and by itself."""

import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from moetor.bench.html import html
from moetor.bench.report import Report
from moetor.bench.svg import COLORS, Line, Point, plot

from .test_report import make_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Tags(HTMLParser):
    """Every tag's attributes, and whether each tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag != "meta":
            assert self.open.pop() == tag


def test_nothing_is_fetched_and_every_tag_is_closed() -> None:
    text = html(make_report())
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {name for name, _ in tags.attributes} & {"src", "href", "xlink:href", "srcset", "data", "action"}
    assert not re.search(r"url\(|@import|<script|https?://", text)
    # and the browser is told so
    assert "default-src 'none'" in text


def test_it_holds_every_time_reason_and_what_they_depend_on() -> None:
    report = make_report()
    report.left_out.append("GO T=1: <no> time")
    text = html(report)
    for words in ("40.0 (39.0–41.0)", "20.0 (19.0–22.0)", "a GPU", "abc", "python script", "no graph: no capture"):
        assert words in text
    assert "GO T=1: &lt;no&gt; time" in text
    assert text.count("<svg") == 2 * 2 * 3  # shapes, modes, plots


def test_an_axis_holds_its_points() -> None:
    points = [Point(2.0**i, 10.0**i, 10.0**i / 2, 10.0**i * 2, f"{i}") for i in range(6)]
    text = plot("a title", [Line("a", "#123456", points)])
    (path,) = re.findall(r'polyline points="([^"]+)"', text)
    places = [tuple(map(float, place.split(","))) for place in path.split()]
    assert places == sorted(places, key=lambda place: (place[0], -place[1]))
    assert all(56 <= x <= 388 and 30 <= y <= 230 for x, y in places)
    assert plot("one point", [Line("a", "#123456", points[:1])]).count("<circle") == 1


def pixels(path: Path) -> np.ndarray:
    """(height, width, 3) of an 8-bit PNG that is not interlaced."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, bits, color = struct.unpack(">IIBB", body[:10])
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    channels = {2: 3, 6: 4}[color]
    assert bits == 8
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    out, above = np.zeros((height, width, channels), np.int32), np.zeros((width, channels), np.int32)
    for y in range(height):
        kind, row = raw[y, 0], raw[y, 1:].reshape(width, channels).astype(np.int32)
        if kind == 1:
            row = np.cumsum(row, axis=0) & 255
        elif kind == 2:
            row = (row + above) & 255
        elif kind in (3, 4):
            left, corner = np.zeros(channels, np.int32), np.zeros(channels, np.int32)
            for x in range(width):
                up = above[x]
                if kind == 3:
                    guess = (left + up) // 2
                else:
                    a, b, c = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
                    guess = np.where((a <= b) & (a <= c), left, np.where(b <= c, up, corner))
                left, corner = (row[x] + guess) & 255, up
                row[x] = left
        out[y], above = row, row
    return out[:, :, :3]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome to look at the page, this machine has none")
def test_a_browser_draws_the_plots(tmp_path: Path) -> None:
    def shot(report: Report) -> np.ndarray:
        page, picture = tmp_path / "report.html", tmp_path / "shot.png"
        page.write_text(html(report), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1300,1000"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
        command = [str(BROWSER), *options, page.as_uri()]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        return pixels(picture)

    def drawn(picture: np.ndarray, color: str) -> int:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        return int((np.abs(picture - wanted).max(axis=2) < 24).sum())

    report = make_report()
    full = shot(report)
    # fused and liger have times: lines and marks in three plots; the legend alone is a hundred pixels
    counts = [drawn(full, color) for color in COLORS[:4]]
    assert min(counts[:2]) > 500, counts
    assert max(counts[2:]) < 50, counts  # the others have none
    for cell in report.cells:
        cell.rows[1].times.clear()
    assert drawn(shot(report), COLORS[1]) < 50
