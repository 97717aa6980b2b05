"""What the backends of others' kernels share: whether this machine has them, and how they are loaded."""

import functools

import torch

from ..core.interface import Call
from ..core.weights import ExpertWeights
from ..kernels.external.machine import Machine, read_machine
from ..kernels.external.packages import fetch, not_loaded
from ..kernels.external.requirements import Library, unmet

# Asked at every call of a layer; a reason may end, when something is fetched.
_able: set[tuple[str, torch.device]] = set()


@functools.cache
def machine_of(device: torch.device) -> Machine:
    return read_machine(device)


def machine_why_not(library: Library, device: torch.device) -> str | None:
    """The first unmet requirement; what is installed is loaded on the way, and nothing is downloaded."""
    if (library.module, device) in _able:
        return None
    machine = machine_of(device)
    reason = unmet(library, machine) or not_loaded(library, machine)
    if reason is None:
        _able.add((library.module, device))
    return reason


def load(library: Library, device: torch.device) -> None:
    """Fetch what is not installed, where the device could run it."""
    machine = machine_of(device)
    if unmet(library, machine) is None:
        fetch(library, machine)


def wrong_device(call: Call) -> str | None:
    """Those kernels take tensors of a GPU."""
    return None if call.device.type == "cuda" else f"needs CUDA tensors, got {call.device.type}"


def major(weights: ExpertWeights) -> int:
    """Major compute capability of the weights' device; 9 for those that are nowhere, as generated pages ask."""
    return _major(weights.device)


def _major(device: torch.device) -> int:
    return machine_of(device).capability[0] if device.type == "cuda" else 9


# What torch._dynamo.assume_constant_result does, without importing all of torch._dynamo with moetor.
_major._dynamo_marked_constant = True  # type: ignore[attr-defined]
