"""What a number depends on: the device, the versions, and the commit."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("triton", "transformers", "liger-kernel", "sonic-moe", "sgl-deep-gemm", "numpy")


def describe_machine(device: torch.device) -> dict[str, str | None]:
    """Names and versions; None for what is not installed."""
    facts: dict[str, str | None] = {"device": _device_name(device), "driver": _driver(device)}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return facts | {name: _version(name) for name in PACKAGES}


def commit() -> str:
    """MOETOR_COMMIT, for copies without git; else the checkout's commit, with "+changes" if it was changed."""
    if given := os.environ.get("MOETOR_COMMIT"):
        return given
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    head = _output([*git, "rev-parse", "--short=12", "HEAD"])
    if head is None:
        return "unknown (no git checkout; set MOETOR_COMMIT)"
    return head + ("+changes" if _output([*git, "status", "--porcelain"]) else "")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, capability {facts.major}.{facts.minor}"
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} threads, {torch.backends.cpu.get_cpu_capability()}"


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    text = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return text.split("\n")[0] if text else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
