"""What a layer's calls take on this machine, backend by backend: written by `moetor tune`, read by `auto`.

One JSON file in the user's cache holds an entry for each kind of call that was measured. An entry counts for the
device, versions and sizes that it was measured with, and for no others.

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

import bisect
import functools
import json
import math
import os
import platform
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
# called when the table has changed
ON_CHANGE: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class Kind:
    """What times depend on besides T.

    Attributes:
        device: its name, see `device_name`.
        dtype: that the products run in, without "torch.".
        format: of the weights.
        sizes: E, K, H, I.
        transposed: weights are stored (E, in, out).
        training: forward and backward.
        graph: as a CUDA graph replays it; else called from Python.
    """

    device: str
    dtype: str
    format: str
    sizes: tuple[int, int, int, int]
    transposed: bool = False
    training: bool = False
    graph: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """Times of one kind of call.

    Attributes:
        versions: see `versions`.
        date: ISO 8601, when they were measured.
        tokens: the T that were measured, ascending.
        times_us: backend to µs at each of them; None where it did not run.
    """

    kind: Kind
    versions: dict[str, str | None]
    date: str
    tokens: list[int]
    times_us: dict[str, list[float | None]]

    def __post_init__(self) -> None:
        if not self.tokens or sorted(set(self.tokens)) != self.tokens or self.tokens[0] < 1:
            raise ValueError(f"tokens must ascend from 1, got {self.tokens}")
        if any(len(times) != len(self.tokens) for times in self.times_us.values()):
            raise ValueError("each backend needs a time, or null, for each number of tokens")

    def expected_us(self, num_tokens: int) -> dict[str, float]:
        """µs of each backend at T, fastest first: between two measured T on a line in log-log, beyond them as there.

        >>> kind = Kind("a GPU", "bfloat16", "dense", (8, 2, 64, 32))
        >>> entry = Entry(kind, {}, "", [1, 4], {"a": [10.0, 40.0], "b": [15.0, None]})
        >>> entry.expected_us(1), entry.expected_us(2)
        ({'a': 10.0, 'b': 15.0}, {'a': 20.0})
        """
        T = self.nearest(num_tokens)
        i = bisect.bisect_right(self.tokens, T) - 1
        low = self.tokens[i]
        found = {}
        for name, times in self.times_us.items():
            here, there = times[i], times[i + 1] if low < T else times[i]
            if here is not None and there is not None:
                share = math.log(T / low) / math.log(self.tokens[i + 1] / low) if low < T else 0.0
                found[name] = round(here ** (1 - share) * there**share, 6)
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def nearest(self, num_tokens: int) -> int:
        """T, or the end of what was measured."""
        return min(max(num_tokens, self.tokens[0]), self.tokens[-1])


def path() -> Path:
    """Where the table lies: MOETOR_CACHE, else moetor's folder in the user's cache."""
    cache = os.environ.get("MOETOR_CACHE")
    base = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "moetor"
    return base.expanduser() / "timings.json"


@functools.cache
def versions() -> dict[str, str | None]:
    """Of what decides how fast a call is."""
    from .. import __version__

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {"moetor": __version__, "torch": torch.__version__, "triton": triton}


def device_name(device: torch.device) -> str:
    """A GPU's model, or the CPU's instruction set and the threads of PyTorch."""
    if device.type == "cuda":
        return _gpu(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@functools.cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def lookup(kind: Kind) -> Entry | None:
    """The entry of this kind; a call's where a graph's was not measured."""
    entries = table()
    found = entries.get(kind)
    if found is None and kind.graph:
        found = entries.get(Kind(**{**_fields(kind), "graph": False}))
    return found


@functools.cache
def table() -> dict[Kind, Entry]:
    """What counts here, read once a process; with one warning if the file, or an entry of it, does not."""
    file = path()
    try:
        entries = _load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"moetor ignores the timings in {file}, which cannot be read: {error!r}", stacklevel=2)
        return {}
    fresh = {entry.kind: entry for entry in entries if entry.versions == versions()}
    if stale := [entry for entry in entries if entry.kind not in fresh]:
        was = ", ".join(f"{name} {version}" for name, version in stale[0].versions.items())
        warnings.warn(
            f"moetor ignores {len(stale)} of {len(entries)} timings in {file}: measured with {was}; run `moetor tune`",
            stacklevel=2,
        )
    return fresh


def save(entries: Iterable[Entry]) -> Path:
    """Put entries into the table, in place of older ones of their kind; calls from now on use them."""
    file = path()
    try:
        known = {entry.kind: entry for entry in _load(file)}
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    known |= {entry.kind: entry for entry in entries}
    file.parent.mkdir(parents=True, exist_ok=True)
    # whoever reads it meanwhile finds the old one or the new one
    partial = file.with_suffix(f".{os.getpid()}")
    data = {"schema": SCHEMA, "entries": [asdict(entry) for entry in known.values()]}
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    forget()
    return file


def forget() -> None:
    """Read the file again at the next call."""
    table.cache_clear()
    for call in ON_CHANGE:
        call()


def _load(file: Path) -> list[Entry]:
    data = json.loads(file.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']}, not {SCHEMA}")
    return [_entry(entry) for entry in data["entries"]]


def _entry(data: dict[str, Any]) -> Entry:
    kind = Kind(**{**data["kind"], "sizes": tuple(data["kind"]["sizes"])})
    if len(kind.sizes) != 4 or not all(isinstance(size, int) for size in kind.sizes):
        raise ValueError(f"sizes must be E, K, H, I, got {kind.sizes}")
    return Entry(**{**data, "kind": kind})


def _fields(kind: Kind) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in Kind.__slots__}
