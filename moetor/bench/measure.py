"""Check, then time: no time for a result that is not within tolerance of a float64 reference.

Letters: T tokens, K experts per token, E experts, S = T·K pairs, H hidden size, I intermediate size.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..testing import Case, Inputs, oracle, prime_memory, relative_error
from ..testing.contract import LIMITS
from .cases import Draw
from .guard import Failure, guarded

Call = Callable[[], Tensor]
# Rows of one expert that the reference takes at a time: 1 GB of float64 at 2·I = 32768.
REFERENCE_ROWS = 4096
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


def reference(draw: Draw) -> Tensor:
    """The result (T, H) in float64 on the draw's device, one expert at a time, so that no stack is widened."""
    out = torch.zeros(draw.hidden_states.shape, dtype=torch.float64, device=draw.hidden_states.device)
    case = Case(dtype=draw.cell.dtype)
    for expert in draw.top_k_index.unique().tolist():
        one = draw.weights.map(lambda tensor: tensor[expert : expert + 1].double())  # noqa: B023  called at once
        tokens, slots = (draw.top_k_index == expert).nonzero(as_tuple=True)
        for token, slot in zip(tokens.split(REFERENCE_ROWS), slots.split(REFERENCE_ROWS), strict=True):
            x, routing = draw.hidden_states[token], draw.top_k_weights[token, slot, None]
            ids = torch.zeros_like(routing, dtype=torch.int64)
            rows, _ = oracle(Inputs(case, one, x, ids, routing), upstream=x)
            out.index_add_(0, token, rows)
    return out


def check(calls: Sequence[Call], references: Sequence[Tensor], draws: Sequence[Draw]) -> float:
    """The largest relative error of the calls' results, each made in memory full of NaN."""
    worst = 0.0
    for call, expected, draw in zip(calls, references, draws, strict=True):
        poison(draw)
        worst = max(worst, relative_error(call(), expected))
    return worst


def wrong(error: float, dtype: torch.dtype, where: str = "the result") -> Failure | None:
    """The failure, if this error is above the contract's limit for the dtype."""
    limit = LIMITS[dtype]
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


class CallSampler:
    """Seconds of a call from Python: all draws back to back, from idle to idle, by the host's clock.

    So it is the larger of the host's and the device's time, plus the last call's tail over the
    number of draws: what a layer costs in a loop of layers.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self._calls, self._cuda = calls, device.type == "cuda"

    def __call__(self) -> float:
        self._wait()
        start = time.perf_counter()
        for call in self._calls:
            call()
        self._wait()
        return (time.perf_counter() - start) / len(self._calls)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


class GraphSampler:
    """Seconds of a call inside a CUDA graph that holds one call of each draw, by device events."""

    def __init__(self, calls: Sequence[Call]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # what a library makes once per stream is made outside the graph
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._results = [call() for call in calls]

    def error(self, references: Sequence[Tensor]) -> float:
        """The largest relative error of what a replay writes, over NaN."""
        for result in self._results:
            result.fill_(float("nan"))
        self._graph.replay()
        return max(relative_error(r, expected) for r, expected in zip(self._results, references, strict=True))

    def __call__(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / len(self._results)


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
