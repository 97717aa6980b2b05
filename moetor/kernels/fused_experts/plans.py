"""Plans of calls, kept by all that they depend on.

How each call is run is worked out once for its shapes: at one token the kernels take 20 µs, and
working out their arguments anew would take longer. A layer has one plan for each number of tokens.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .operands import Call

_MOST_PLANS = 4096


class Plan(Protocol):
    @property
    def ready(self) -> bool:
        """Whether it has been run once, so that all of its kernels are compiled."""
        ...


P = TypeVar("P", bound=Plan)


class Plans(Generic[P]):
    """Plans of one kind."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], P] = {}

    def find(self, key: tuple[Any, ...]) -> P | None:
        return self._plans.get(key)

    def keep(self, key: tuple[Any, ...], plan: P) -> None:
        """Keep a plan that has been run: another thread may find it at once."""
        if not plan.ready:  # Triton's interpreter compiles nothing
            return
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan


def signature(call: Call) -> tuple[Any, ...]:
    """All that a plan depends on, but the gate and the precision."""
    x, ids, routing = call.x, call.ids, call.routing
    weights = [*call.up, *call.up_bias, call.down]
    if call.down_bias is not None:
        weights.append(call.down_bias)
    return (
        x.device.index, x.shape, x.stride(), x.dtype, ids.shape, ids.dtype, routing.dtype, call.interleaved,
        len(call.up), len(call.up_bias), *[(w.dtype, w.shape, w.stride()) for w in weights],
        *[tensor.data_ptr() % 16 for tensor in (x, ids, routing, *weights)],
    )  # fmt: skip


def uses_tf32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the tensors' own device."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else nullcontext()
