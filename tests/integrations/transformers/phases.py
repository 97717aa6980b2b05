"""What tests of the decode phase share: which backends ran, and callbacks that look at a model inside `generate`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moetor import ExpertsInterface
from moetor.integrations.transformers import experts_of
from moetor.integrations.transformers.adapters import is_experts

NAMES = ("fused", "grouped_mm", "batched_mm", "eager")


class Ran:
    """The calls of experts so far: which backend, with how many tokens, of which weights."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, Tensor]] = []

    def take(self, model: nn.Module | None = None) -> list[tuple[str, int]]:
        """Backend and number of tokens of every call since the last `take`, of this model only if one is given."""
        taken, self.calls = self.calls, []
        if model is not None:
            own = [experts_of(module).down.first.data_ptr() for module in model.modules() if is_experts(module)]
            taken = [call for call in taken if call[2].data_ptr() in own]
        return [(name, num_tokens) for name, num_tokens, _ in taken]

    def names(self, model: nn.Module | None = None) -> list[str]:
        """The backends since the last `take`, once for calls in a row."""
        names = [name for name, _ in self.take(model)]
        return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


@contextmanager
def watched() -> Iterator[Ran]:
    """Every backend notes that it ran; what was asked for does not count."""
    ran = Ran()
    before = [ExpertsInterface[name] for name in NAMES]

    def noting(backend: Any) -> Any:
        def forward(weights: Any, hidden_states: Tensor, *rest: Tensor) -> Tensor:
            ran.calls.append((backend.name, len(hidden_states), weights.down.first))
            return backend.forward(weights, hidden_states, *rest)

        return replace(backend, forward=forward)

    for backend in before:
        ExpertsInterface.register(backend.name, noting(backend), replace=True)
    try:
        yield ran
    finally:
        for backend in before:
            ExpertsInterface.register(backend.name, backend, replace=True)


class Streamer:
    """Calls `look` for the prompt and for each token, and keeps what it returns."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look, self.seen = look, []

    def put(self, value: Tensor) -> None:
        self.seen.append(self.look())

    def end(self) -> None:
        pass


class Criterion:
    """A stopping criterion that never stops, calls `look` after every step and keeps what it returns."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look, self.seen = look, []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append(self.look())
        return input_ids.new_zeros(len(input_ids)).bool()
