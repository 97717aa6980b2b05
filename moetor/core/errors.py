"""Every error that moetor raises on purpose.

    MoetorError
    ├── InvalidInput         (ValueError)   shapes, dtypes, ids or options that do not fit
    ├── UnknownBackend       (ValueError)   no backend, or no sub-config, has this name
    ├── BackendRefused       (ValueError)   the backend cannot run this call
    ├── BackendUnavailable   (ImportError)  the backend cannot run on this machine
    └── CheckpointError      (ValueError)   a checkpoint lacks experts or cannot be read

Each is also the built-in error that a caller would expect, so `except ValueError` works.
"""

import difflib
from collections.abc import Iterable


class MoetorError(Exception):
    """Base of all errors above."""


class InvalidInput(MoetorError, ValueError):
    """Shapes, dtypes, ids or options that do not fit together."""


class UnknownBackend(MoetorError, ValueError):
    """A name that no backend, or no sub-config of the model, has."""


class BackendRefused(MoetorError, ValueError):
    """The backend runs on this machine, but not this call."""


class BackendUnavailable(MoetorError, ImportError):
    """No device of this machine, or not the device of the call, can run the backend."""


class CheckpointError(MoetorError, ValueError):
    """A checkpoint lacks experts, or a file of it cannot be read."""


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownBackend:
    """The error for a name that is not in `known`, with near names first.

    >>> print(unknown_name("experts backend", "gruped_mm", ["eager", "grouped_mm"]))
    unknown experts backend 'gruped_mm'; did you mean 'grouped_mm'? known: eager, grouped_mm
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=2, cutoff=0.5)
    hint = f" did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UnknownBackend(f"unknown {what} {name!r};{hint} known: {', '.join(names)}")
