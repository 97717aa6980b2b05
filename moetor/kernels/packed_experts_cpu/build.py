"""Compile rows.cpp for this machine, once, where it has a C++ compiler; and load it.

The result lies in moetor's folder in the user's cache (MOETOR_CACHE names another), under a name made of all that
it depends on: sources, compiler, flags, processor. CXX names another compiler than the first that is found.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("moetor")

_SOURCES = ("rows.cpp", "vectors.h", "tables.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC")
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
# As moetor_packed_rows in rows.cpp has them.
_ARGUMENTS = [_INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, *[_INT] * 8]
_TIMEOUT_S = 120


def compiler() -> str | None:
    """The C++ compiler that would be used; None: there is none. Compiles nothing."""
    given = os.environ.get("CXX")
    names = _COMPILERS if given is None else (given,)
    return next((found for name in names if (found := shutil.which(name))), None)


@functools.cache
def function() -> Any:
    """`moetor_packed_rows`, compiled by the first call of this machine's first process; None if it cannot be had."""
    command = compiler()
    if command is None:
        return None
    for flags in _flags_to_try():
        try:
            loaded: Any = ctypes.CDLL(str(_built(command, flags))).moetor_packed_rows
        except subprocess.CalledProcessError as error:
            logger.info("%s %s failed: %s", command, " ".join(flags), error.stderr.strip()[-500:])
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.info("%s %s failed: %s", command, " ".join(flags), error)
        else:
            loaded.argtypes, loaded.restype = _ARGUMENTS, None
            return loaded
    logger.warning("quantised experts run dequantised on this CPU: %s could not compile %s", command, _SOURCES[0])
    return None


def _flags_to_try() -> list[tuple[str, ...]]:
    """Best first: this machine's instructions, and threads of the runtime that torch has loaded already.

    A second OpenMP runtime would have threads of its own, that wait for work while torch's do.
    """
    native = ("-march=native",)
    runtime = _openmp_of_torch()
    threads = [(*native, "-fopenmp", runtime)] if runtime else []
    return [*threads, native, ()]


def _openmp_of_torch() -> str | None:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = (line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libiomp5" in line)
    return next((file for file in files if Path(file).is_file()), None)


def _built(command: str, flags: tuple[str, ...]) -> Path:
    """The compiled library; an error of `subprocess` or OSError if it cannot be made."""
    here, folder = Path(__file__).parent, _folder()
    version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    parts = [*((here / name).read_text() for name in _SOURCES), version, *_FLAGS, *flags, _processor()]
    built = folder / f"packed_rows_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if built.is_file():
        return built
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as room:
        new = Path(room, built.name)
        # without -fopenmp for the linker, which would add its own runtime to that of torch
        runtime = [flag for flag in flags if flag.startswith("/")]
        rest = [flag for flag in flags if flag not in runtime]
        unit = Path(room, "rows.o")
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        run([command, *_FLAGS, *rest, "-c", str(here / _SOURCES[0]), "-o", str(unit)])
        run([command, "-shared", str(unit), *runtime, "-o", str(new)])
        os.replace(new, built)  # whole, or not there: other processes may do the same
    logger.info(
        "compiled the CPU code of quantised experts by %s in %.1f s: %s", command, time.monotonic() - start, built
    )
    return built


def _folder() -> Path:
    cache = os.environ.get("MOETOR_CACHE")
    folder = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moetor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="moetor"))


def _processor() -> str:
    """What "native" means here; a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(next((line for line in lines if line.startswith(name)), "") for name in ("flags", "Features"))
