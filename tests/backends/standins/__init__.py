"""Stand-ins for libraries that only a GPU can run: the real signatures, what they demand, and the true result."""

from dataclasses import replace
from types import ModuleType

import torch

from moetor import Backend, Call, ExpertsInterface, ExpertWeights
from moetor.kernels.external import packages


def register(backend: Backend, library: ModuleType, module: str) -> str:
    """The backend on CPU tensors, by a stand-in for its library, under a name of its own; the name."""
    packages._loaded[module] = library
    packages._described[module] = f"stand-in of {module}"
    name = f"{backend.name}_standin"

    def why_not(weights: ExpertWeights, call: Call) -> str | None:
        return backend.why_not(weights, replace(call, device=torch.device("cuda")))

    standin = replace(backend, name=name, machine_why_not=lambda device: None, why_not=why_not)
    ExpertsInterface.register(name, standin)
    return name


def unregister(name: str, module: str) -> None:
    ExpertsInterface.unregister(name)
    del packages._loaded[module], packages._described[module]
