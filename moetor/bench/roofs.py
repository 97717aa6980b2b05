"""What this machine can do at best, measured once a run, and the least time it leaves a cell."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..core.cost import Cost, cost
from .cases import Draw


@dataclass(frozen=True, slots=True)
class Roofs:
    """Measured ceilings.

    Attributes:
        bytes_per_s: of a device copy, bytes read plus bytes written.
        flops_per_s: of a square matrix product in `dtype`.
        dtype: of the product, without "torch.".
    """

    bytes_per_s: float
    flops_per_s: float
    dtype: str


def measure_roofs(device: torch.device, dtype: torch.dtype, repeats: int = 20) -> Roofs:
    """Medians of `repeats`; on a GPU a copy of 1 GiB and a product of 8192³, on a CPU smaller ones."""
    bytes_per_s = _copy_bytes_per_s(device, repeats)
    return Roofs(bytes_per_s, _matmul_flops_per_s(device, dtype, repeats), str(dtype).removeprefix("torch."))


# random data in both: a GPU can run faster on zeros than it does on numbers


def _copy_bytes_per_s(device: torch.device, repeats: int) -> float:
    count = 2**29 if device.type == "cuda" else 2**24
    source = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device, repeats)


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    side = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _median_s(lambda: left @ right, device, repeats)


def cost_of(draws: Sequence[Draw]) -> tuple[Cost, float]:
    """The mean cost of a call and the mean number of experts hit, of the draws as they were made.

    Training is three times the forward's: each product has two more in the backward pass, weights are
    read again and their gradients written.
    """
    hit = statistics.fmean(draw.hit for draw in draws)
    draw = draws[0]
    forward = cost(draw.weights, draw.cell.tokens, draw.cell.shape.top_k, hit)
    if not draw.cell.training:
        return forward, hit
    return Cost(3 * forward.flops, 3 * forward.weight_bytes, 3 * forward.activation_bytes), hit


def _median_s(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for i in range(repeats + 3):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            action()
            end.record()
            end.synchronize()
            seconds = float(start.elapsed_time(end)) / 1e3
        else:
            begin = time.perf_counter()
            action()
            seconds = time.perf_counter() - begin
        if i >= 3:  # the first ones load kernels and touch fresh memory
            times.append(seconds)
    return statistics.median(times)
