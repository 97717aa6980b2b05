"""A whole model of transformers, random weights: prefill and decode, its experts by one implementation after another.

The implementations of transformers and ours take turns in one model, on the same weights.
"""

import functools
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from ..testing import relative_error
from .guard import Failure, guarded
from .measure import time_alternating
from .model_report import ModelCell, ModelReport, ModelRow
from .samplers import COMPILE_MODES

PHASES = ("prefill", "decode")
# transformers' own, then ours by `auto`; "moetor:NAME" is a backend of ours.
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "moetor")
REFERENCE = "eager"
# Steps of a decoding sample, and of a cache until it is filled anew.
STEPS, ROOM = 8, 64
# Against transformers' eager in the same dtype, which rounds as well: in 16 bits a router may choose other experts for
# a token where two are as good; experts that are wrong give 1.
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-9}
LIMIT_16_BITS = 0.2


def build(path: str, dtype: torch.dtype, device: torch.device, layers: int | None = None) -> Any:
    """A causal language model with random weights from a config.json, on the device.

    Args:
        layers: fewer than the config's, for a machine that cannot hold all.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..integrations import transformers as _ours  # noqa: F401  "moetor" becomes a name in transformers

    try:
        config = AutoConfig.from_pretrained(Path(path).expanduser())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--model needs a folder with a config.json of transformers, got {path}: {error}") from error
    if layers is not None:
        config.num_hidden_layers = layers
        with suppress(AttributeError):
            config.layer_types = config.layer_types[:layers]
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def run_model(
    model: Any,
    sizes: Sequence[tuple[int, int]],
    implementations: Sequence[str],
    modes: Sequence[str],
    report: ModelReport,
    seconds: float,
    first_s: float,
    budget_s: float | None,
) -> Iterator[ModelCell]:
    """Prefill, then decode, at each (batch, length); each cell is yielded when it is done.

    Args:
        modes: "call" and torch.compile's, see `samplers.COMPILE_MODES`.
        seconds: of timing for a cell and mode; first_s: most for a check, compilation included.
    """
    start = time.monotonic()
    for (batch, length), phase in itertools.product(sizes, PHASES):
        cell = ModelCell(phase, batch, length)
        if budget_s is not None and time.monotonic() - start >= budget_s:
            report.left_out.append(f"{phase}, batch {batch}, length {length}: the budget of {budget_s:g} s was spent")
            continue
        with torch.no_grad():
            _run_cell(model, cell, implementations, modes, seconds, first_s)
        report.cells.append(cell)
        yield cell


def _run_cell(
    model: Any, cell: ModelCell, implementations: Sequence[str], modes: Sequence[str], seconds: float, first_s: float
) -> None:
    forward = _Prefill if cell.phase == "prefill" else _Decode
    reference = guarded(lambda: forward(model, cell, REFERENCE, model).logits())
    for mode in modes:
        torch.compiler.reset()
        called = model if mode == "call" else torch.compile(model, mode=COMPILE_MODES[mode], dynamic=False)
        samplers: dict[str, Callable[[], float]] = {}
        rows = {name: ModelRow(name, mode) for name in implementations}
        cell.rows += rows.values()
        for name, row in rows.items():
            attempt = functools.partial(_checked, forward, (model, cell, name, called), reference)
            checked = guarded(attempt, first_s)
            if isinstance(checked, Failure):
                row.status, row.reason = checked.status, checked.reason
                continue
            samplers[name], row.error = checked
            limit = LIMITS.get(model.dtype, LIMIT_16_BITS)
            if row.error > limit:
                row.status, row.reason = "wrong", f"the logits are off by {row.error:.1e}, more than {limit:.1e}"
                del samplers[name]
        for name, timing in time_alternating(samplers, 1, seconds).items():
            row = rows[name]
            if isinstance(timing, Failure):
                row.status, row.reason = timing.status, timing.reason
            else:
                row.time = timing


def _checked(
    kind: "type[_Prefill | _Decode]", arguments: tuple[Any, ...], reference: Tensor | Failure
) -> tuple[Callable[[], float], float]:
    """What times it, and the error of its logits."""
    if isinstance(reference, Failure):
        raise RuntimeError(f"transformers' {REFERENCE}, which results are compared with: {reference.reason}")
    forward = kind(*arguments)
    for _ in range(2):  # compile, record
        forward.logits()
    return forward, relative_error(forward.logits(), reference)


class _Prefill:
    """One forward of all tokens, without a cache, for the last one's logits."""

    def __init__(self, model: Any, cell: ModelCell, implementation: str, called: Any) -> None:
        self.model, self.called, self.implementation = model, called, implementation
        self.ids = _ids(model, cell.batch, cell.length)

    def logits(self) -> Tensor:
        self.model.set_experts_implementation(self.implementation)
        out: Tensor = self.called(self.ids, use_cache=False, logits_to_keep=1).logits
        return out.clone()

    def __call__(self) -> float:
        self.model.set_experts_implementation(self.implementation)
        return _timed_s(self.model.device, lambda: self.called(self.ids, use_cache=False, logits_to_keep=1))


class _Decode:
    """Steps of one token a sequence, after a prompt in a static cache."""

    def __init__(self, model: Any, cell: ModelCell, implementation: str, called: Any) -> None:
        from transformers import StaticCache

        self.model, self.called, self.implementation = model, called, implementation
        self.ids = _ids(model, cell.batch, cell.length)
        self.cache = StaticCache(config=model.config, max_cache_len=cell.length + ROOM)
        # transformers is renaming it
        known = inspect.signature(model.forward).parameters
        self.cached = {"cache" if "cache" in known else "past_key_values": self.cache}
        self.left = 0

    def logits(self) -> Tensor:
        self.left = 0
        self._prepare(1)
        return self._step().clone()

    def __call__(self) -> float:
        self._prepare(STEPS)
        return _timed_s(self.model.device, lambda: [self._step() for _ in range(STEPS)]) / STEPS

    def _prepare(self, steps: int) -> None:
        """The implementation, and a cache with room; the prompt is always eager's, so that all decode the same."""
        if self.left < steps:
            self.cache.reset()
            self.model.set_experts_implementation(REFERENCE)
            self.model(self.ids, logits_to_keep=1, **self.cached)
            self.left = ROOM
        self.left -= steps
        self.model.set_experts_implementation(self.implementation)

    def _step(self) -> Tensor:
        out: Tensor = self.called(self.ids[:, :1], logits_to_keep=1, **self.cached).logits
        return out


def _ids(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator(model.device).manual_seed(batch * 10**6 + length)
    return torch.randint(model.config.vocab_size, (batch, length), device=model.device, generator=generator)


def _timed_s(device: torch.device, action: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
