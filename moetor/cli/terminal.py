"""Where commands print, and how they fail: results on stdout, everything else on stderr, an error as one line."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from ..core.errors import InvalidInput, MoetorError, UnknownBackend

out = Console()
err = Console(stderr=True)

# transformers lists all its classes in some messages
MAX_CHARACTERS = 500

# As for a misspelt option: the command was wrong, whatever the machine and the files.
_USAGE = (InvalidInput, UnknownBackend)


def fail(message: object, code: int = 1) -> typer.Exit:
    """Print one line to stderr; raise what this returns."""
    line = textwrap.shorten(str(message), MAX_CHARACTERS, placeholder=" …")
    err.print("error:", line, style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)


@contextmanager
def errors_in_one_line(*expected: type[Exception]) -> Iterator[None]:
    """Turn moetor's own errors, and the `expected` ones, into one line and an exit code: 2 for a wrong command, else 1.

    Any other exception is a bug and keeps its traceback.
    """
    caught: tuple[type[Exception], ...] = (MoetorError, *expected)
    try:
        yield
    except caught as error:
        raise fail(error, 2 if isinstance(error, _USAGE) else 1) from error
