"""What this machine is: versions and devices, for bug reports."""

import os
import platform
import subprocess
from importlib import metadata
from typing import Any

import torch

import moetor

from ..kernels.external import machine as external

# packages whose version changes what a backend does; read without importing them
PACKAGES = (
    "transformers",
    "triton",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    *external.DISTRIBUTIONS,
)


def versions() -> dict[str, str | None]:
    """Versions by name; None for what is not here."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "moetor": moetor.__version__,
        "torch": torch.__version__,
        **{name: _installed(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "nvcc": _nvcc(),
        "hip": torch.version.hip,
        "driver": _driver(),
    }


def settings() -> dict[str, str]:
    """Environment variables that change what moetor does."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MOETOR_")}


def devices() -> list[torch.device]:
    """The CPU, then every accelerator that torch can use."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    return found


def default_device() -> torch.device:
    """The first accelerator, else the CPU."""
    return devices()[1] if len(devices()) > 1 else devices()[0]


def describe(device: torch.device) -> dict[str, Any]:
    """Name, and of a GPU its compute capability and memory."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        capability = f"{facts.major}.{facts.minor}"
        return {"device": str(device), "name": facts.name, "capability": capability, "bytes": facts.total_memory}
    name = f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    return {"device": str(device), "name": name if device.type == "cpu" else device.type, "capability": None}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nvcc() -> str | None:
    """The toolkit that kernels compiled at run time use: version and folder."""
    toolkit = external.find_toolkit()
    if toolkit is None:
        return None
    return f"{'.'.join(map(str, toolkit.nvcc)) if toolkit.nvcc else 'none'} in {toolkit.home}"


def _driver() -> str | None:
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None  # containers often lack the tool; the rest of the report is worth having
