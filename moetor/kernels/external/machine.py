"""What a machine has of all that kernels of others ask for: facts, gathered once, and written down by tests."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

# Distributions whose presence or version some requirement asks for.
DISTRIBUTIONS = (
    *("sgl-deep-gemm", "deep-gemm", "sonic-moe"),
    *("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "kernels"),
)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA toolkit: its folder, and the version of its nvcc; None where it has none (a runtime-only install)."""

    home: str
    nvcc: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Machine:
    """One device and what is installed beside it.

    Attributes:
        device: its type, "cuda" or another.
        hip: ROCm's version where torch is built for it.
        capability: of a CUDA device.
        toolkit: None where no folder of one is found.
        versions: of the installed `DISTRIBUTIONS`.
    """

    device: str
    hip: str | None = None
    capability: tuple[int, int] = (0, 0)
    python: tuple[int, int] = sys.version_info[:2]
    toolkit: Toolkit | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def read_machine(device: torch.device) -> Machine:
    """The facts of this process's machine and one of its devices."""
    if device.type != "cuda":
        return Machine(device.type)
    versions = {name: version for name in DISTRIBUTIONS if (version := _installed(name))}
    capability = torch.cuda.get_device_capability(device)
    return Machine("cuda", torch.version.hip, capability, toolkit=find_toolkit(), versions=versions)


def find_toolkit() -> Toolkit | None:
    """The toolkit that run-time compilers will use: CUDA_HOME, CUDA_PATH, that of nvcc on PATH, /usr/local/cuda."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        home = Path(named)
    elif nvcc := shutil.which("nvcc"):
        home = Path(nvcc).parent.parent
    else:
        home = Path("/usr/local/cuda")
        if not home.exists():
            return None
    return Toolkit(str(home), _nvcc_version(home / "bin" / "nvcc"))


def _nvcc_version(nvcc: Path) -> tuple[int, int] | None:
    try:
        said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
