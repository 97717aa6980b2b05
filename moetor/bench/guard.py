"""A stranger's code, run so that what goes wrong is a result: an error, too little memory, too much time."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch

from ..core.errors import MoetorError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """What came in place of a result.

    Attributes:
        status: "failed", "out of memory", "timed out" or "wrong".
        reason: one line.
    """

    status: str
    reason: str


class DeviceLost(MoetorError, RuntimeError):
    """The device answers nothing any more: the process has to end, keeping what it has."""


class _TimeIsUp(BaseException):
    """Not an Exception: compilers and autotuners catch those and go on."""


def guarded(action: Callable[[], T], limit_s: float | None = None) -> T | Failure:
    """The action's result, or what went wrong.

    Args:
        limit_s: for the whole action; looked at between two steps of Python, on the main thread
            only. None: no limit.

    Raises:
        DeviceLost: after the failure the device cannot be used.
    """
    try:
        with _time_limit(limit_s):
            return action()
    except _TimeIsUp:
        failure = Failure("timed out", f"took longer than {limit_s:.2g} s")
    except torch.OutOfMemoryError as error:
        failure = Failure("out of memory", one_line(error))
    except Exception as error:  # whatever a peer raises is a cell of the table
        failure = Failure("failed", f"{type(error).__name__}: {one_line(error)}")
    _recover(failure)
    return failure


def one_line(message: object, length: int = 300) -> str:
    """Collapsed to one line, and cut."""
    text = " ".join(str(message).split())
    return text if len(text) <= length else text[: length - 2] + " …"


def _recover(failure: Failure) -> None:
    gc.collect()  # a traceback's frames held tensors
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(f"the device cannot be used after: {failure.reason} ({one_line(error, 100)})") from error


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
