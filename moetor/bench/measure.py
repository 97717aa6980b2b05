"""Check, then time: no time for a result that is not within tolerance of a float64 reference.

Letters: T tokens, K experts per token, E experts, S = T·K pairs, H hidden size, I intermediate size.
"""

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..testing import prime_memory, relative_error
from ..testing.contract import GRADIENT, LIMITS, QUANTIZED_LIMIT
from .cases import Cell, Draw
from .guard import Failure, guarded

# The result of one call and, in training, the gradients of the draw's leaves.
Call = Callable[[], list[Tensor]]
MOST_SAMPLES = 200
FEWEST_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """µs of one call: median and quartiles of `samples` passes over all draws of a cell."""

    median_us: float
    q1_us: float
    q3_us: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """
        >>> Timing.of([1e-6, 3e-6, 2e-6])
        Timing(median_us=2.0, q1_us=1.5, q3_us=2.5, samples=3)
        """
        q1, median, q3 = (q * 1e6 for q in statistics.quantiles(seconds, n=4, method="inclusive"))
        return cls(round(median, 3), round(q1, 3), round(q3, 3), len(seconds))


def trained(call: Callable[[], Tensor], draw: Draw) -> Call:
    """Forward, then the gradients of every leaf."""
    leaves = draw.leaves()

    def step() -> list[Tensor]:
        out = call()
        return [out.detach(), *torch.autograd.grad(out, leaves, draw.upstream)]

    return step


def inferred(call: Callable[[], Tensor]) -> Call:
    """Forward alone."""
    return lambda: [call()]


def check(calls: Sequence[Call], references: Sequence[Sequence[Tensor]], draws: Sequence[Draw]) -> float:
    """The largest relative error of the calls' results, each made in memory full of NaN."""
    worst = 0.0
    for call, expected, draw in zip(calls, references, draws, strict=True):
        poison(draw)
        worst = max(worst, error_of(call(), expected))
    return worst


def error_of(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of a result and, where the reference has them, of the gradients.

    A gradient passes through twice as many rounded products, so its error counts half; that of one
    which is nearly zero is measured by all of them together.
    """
    total = sum(gradient.norm().item() ** 2 for gradient in expected[1:]) ** 0.5
    errors = [relative_error(results[0], expected[0])]
    errors += [
        relative_error(got, wanted, floor=1e-3 * total) / GRADIENT
        for got, wanted in zip(results[1:], expected[1:], strict=False)
    ]
    return max(errors)


def wrong(error: float, cell: Cell, where: str = "the result") -> Failure | None:
    """The failure, if this error is above the contract's limit for the cell."""
    limit = LIMITS[cell.dtype] if cell.format == "dense" else max(LIMITS[cell.dtype], QUANTIZED_LIMIT)
    if error <= limit:
        return None
    how = f"is off by {error:.1e}, more than {limit:.1e}" if math.isfinite(error) else "has NaN or another shape"
    return Failure("wrong", f"{where} {how}")


def poison(draw: Draw) -> None:
    """Fill with NaN what the allocator will hand out for the result and the rows in between."""
    x, device = draw.hidden_states, draw.hidden_states.device
    prime_memory(device)
    pairs, inner = draw.top_k_index.numel(), draw.weights.intermediate_size
    sizes = [x.numel(), pairs * inner, 2 * pairs * inner, pairs * x.shape[1]]
    blocks = []
    try:
        for size in sizes:
            blocks += [torch.full((size,), float("nan"), dtype=d, device=device) for d in (x.dtype, torch.float32)]
    except torch.OutOfMemoryError:
        blocks.clear()  # poisoned as far as there was room


def extra_bytes(call: Call, device: torch.device) -> int | None:
    """The most that one call takes beyond what is there, its result included; None where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def time_alternating(
    samplers: dict[str, Callable[[], float]], draws: int, seconds: float
) -> dict[str, Timing | Failure]:
    """Sample the candidates in turn, round by round, so that a change of clocks meets all of them.

    Args:
        samplers: name to a function that gives seconds a call.
        draws: calls that a sample holds.
        seconds: for all of them together; slow ones get fewer samples, never fewer than `FEWEST_SAMPLES`.
    """
    results: dict[str, Timing | Failure] = {}
    wanted: dict[str, int] = {}
    for name, sampler in samplers.items():
        first = guarded(sampler)
        if isinstance(first, Failure):
            results[name] = first
        else:
            share = seconds / len(samplers) / (first * draws)
            wanted[name] = max(FEWEST_SAMPLES, min(MOST_SAMPLES, int(share)))
    rounds = max(wanted.values(), default=0)
    taken: dict[str, list[float]] = {name: [] for name in wanted}
    gc.collect()
    gc.disable()  # a collection in the middle of a sample is nobody's time
    try:
        for r in range(rounds):
            for name, count in wanted.items():
                # `count` of the rounds, evenly spread
                if name in results or (r + 1) * count // rounds == r * count // rounds:
                    continue
                sample = guarded(samplers[name])
                if isinstance(sample, Failure):
                    results[name] = sample
                else:
                    taken[name].append(sample)
    finally:
        gc.enable()
    return results | {name: Timing.of(times) for name, times in taken.items() if name not in results}
