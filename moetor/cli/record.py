"""Which backends really run: what a policy chose, call by call, and what the decode phase switched to."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from ..core.interface import Backend, ExpertsInterface
from ..core.weights import ExpertWeights


@contextmanager
def record_backends() -> Iterator[Counter[str]]:
    """Inside, count the calls of each backend, of all threads.

    Every backend is replaced by one that counts itself and then does what it did; policies are not counted, what they
    choose is.
    """
    calls: Counter[str] = Counter()

    def counting(backend: Backend) -> Backend:
        def forward(weights: ExpertWeights, x_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            calls[backend.name] += 1
            return backend.forward(weights, x_TH, top_k_index, top_k_weights)

        return replace(backend, forward=forward)

    before = [ExpertsInterface[name] for name in ExpertsInterface.names()]
    try:
        for backend in before:
            if backend.choose is None:
                ExpertsInterface.register(backend.name, counting(backend), replace=True)
        yield calls
    finally:
        for backend in before:
            ExpertsInterface.register(backend.name, backend, replace=True)
