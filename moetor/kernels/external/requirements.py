"""Why a machine cannot run a kernel of others: the first requirement that it does not meet, in one sentence."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .machine import Machine

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Library:
    """A Python package of kernels and what it asks for.

    Attributes:
        module: what is imported.
        distributions: that bring the module, each with the least version that is known to work, the usual one first.
        beside: distributions that it imports, with least versions, by the distribution that brings the module.
        hub: where the package `kernels` gets it.
        python: the least version.
        nvcc: the least version of the toolkit that compiles it at run time, by major compute capability; none: it
            brings its own compiler.
    """

    module: str
    distributions: dict[str, str]
    beside: dict[str, dict[str, str]]
    hub: str
    capabilities: tuple[int, ...]
    python: tuple[int, int] = (3, 11)
    nvcc: dict[int, tuple[int, int]] | None = None


DEEP_GEMM = Library(
    module="deep_gemm",
    distributions={"sgl-deep-gemm": "0.1.4", "deep-gemm": "2.1"},
    beside={"sgl-deep-gemm": {"apache-tvm-ffi": "0.1.11"}},
    hub="kernels-community/deep-gemm",
    capabilities=(9, 10),
    nvcc={9: (12, 3), 10: (12, 9)},
)
SONIC_MOE = Library(
    module="sonicmoe",
    distributions={"sonic-moe": "0.1.2"},
    beside={"sonic-moe": {"nvidia-cutlass-dsl": "4.4.2", "quack-kernels": "0.3.11", "apache-tvm-ffi": "0.1.11"}},
    hub="kernels-community/sonic-moe",
    capabilities=(9, 10),
    python=(3, 12),
)


def unmet(library: Library, machine: Machine) -> str | None:
    """The first requirement of a library that the machine does not meet; None: it can be loaded.

    >>> unmet(DEEP_GEMM, Machine("cpu"))
    'needs an NVIDIA GPU, got cpu'
    >>> unmet(DEEP_GEMM, Machine("cuda", capability=(8, 9)))
    'needs compute capability 9.0 or 10.0, got 8.9'
    """
    checks: Iterable[Callable[[Library, Machine], str | None]] = (_gpu, _capability, _python, _package, _toolkit)
    return next((reason for check in checks if (reason := check(library, machine))), None)


def _gpu(library: Library, machine: Machine) -> str | None:
    if machine.device != "cuda":
        return f"needs an NVIDIA GPU, got {machine.device}"
    return f"needs an NVIDIA GPU, got ROCm {machine.hip}" if machine.hip else None


def _capability(library: Library, machine: Machine) -> str | None:
    if machine.capability[0] in library.capabilities:
        return None
    known = " or ".join(f"{major}.0" for major in library.capabilities)
    return f"needs compute capability {known}, got {_dotted(machine.capability)}"


def _python(library: Library, machine: Machine) -> str | None:
    if machine.python >= library.python:
        return None
    return f"needs Python {_dotted(library.python)} or newer, got {_dotted(machine.python)}"


def _package(library: Library, machine: Machine) -> str | None:
    usual, found = next(iter(library.distributions)), distribution_of(library, machine)
    if found is None:
        if "kernels" in machine.versions:
            return None
        return f"needs the package {usual}, or the package kernels to fetch {library.hub}; neither is installed"
    needed = {found: library.distributions[found], **library.beside.get(found, {})}
    for name, least in needed.items():
        if name not in machine.versions:
            return f"needs the package {name} {least} or newer beside {found}; it is not installed"
        if _numbers(machine.versions[name]) < _numbers(least):
            return f"needs {name} {least} or newer, got {machine.versions[name]}"
    return None


def _toolkit(library: Library, machine: Machine) -> str | None:
    if library.nvcc is None:
        return None
    least, toolkit = library.nvcc[machine.capability[0]], machine.toolkit
    needs = f"needs a CUDA toolkit with nvcc {_dotted(least)} or newer on compute capability"
    needs += f" {_dotted(machine.capability)}"
    if toolkit is None:
        return f"{needs}; CUDA_HOME, CUDA_PATH, nvcc on PATH and /usr/local/cuda name none"
    if toolkit.nvcc is None:
        return f"{needs}; {toolkit.home} has no nvcc, as runtime-only installs have none"
    return f"{needs}; {toolkit.home} has {_dotted(toolkit.nvcc)}" if toolkit.nvcc < least else None


def distribution_of(library: Library, machine: Machine) -> str | None:
    """The installed distribution that brings the library's module."""
    return next((name for name in library.distributions if name in machine.versions), None)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them.

    >>> _numbers("0.1.2.post1"), _numbers("2.1.0+cu130")
    ((0, 1, 2), (2, 1, 0))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
