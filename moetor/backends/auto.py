"""The best backend that can run a call: a policy, not a way to compute.

Best is what `moetor tune` measured on this machine, where it did (timings.py), and else the defaults below.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ..core.cost import bytes_per_expert
from ..core.interface import Backend, Call, ExpertsInterface, describe_call
from ..core.weights import ExpertWeights
from . import batched_mm, timings

# On an H200 gathering 66 MiB wins over sorting, 106 to 339 µs; 672 MiB loses, 547 to 382.
GATHERED_BYTES = 256 * 2**20
# Ahead of transformers' own backends at every size in benchmarks/2026-12-01-layer-forward-h200, 1 to 16384 tokens.
FIRST_ON_CUDA = ("fused",)


def few_pairs(weights: ExpertWeights) -> int:
    """The most pairs for which, on a GPU, gathering their matrices (batched_mm) beats sorting them (grouped_mm).

    Within it batched_mm runs whatever grouped_mm runs: its own bound is kept.
    """
    return int(min(GATHERED_BYTES, batched_mm.GATHER_BYTES) / bytes_per_expert(weights))


def choose(weights: ExpertWeights, call: Call) -> Backend:
    """The first that gives no reason against the call; eager, whose own error is best, if all do."""
    # what comes later is worked out where nothing before it can run
    return (
        _able(_measured(weights, call) or _first(call), weights, call)
        or _able(_rest(weights, call), weights, call)
        or ExpertsInterface["eager"]
    )


def _able(names: tuple[str, ...], weights: ExpertWeights, call: Call) -> Backend | None:
    for name in names:
        # a table may name a backend of somebody's own, who is not here today
        if name in ExpertsInterface and ExpertsInterface[name].refusal(weights, call) is None:
            return ExpertsInterface[name]
    return None


def _first(call: Call) -> tuple[str, ...]:
    return ("fused",) if call.device.type == "cpu" else FIRST_ON_CUDA


def _rest(weights: ExpertWeights, call: Call) -> tuple[str, ...]:
    if call.device.type == "cpu":
        return ("grouped_mm",)
    few = _static(weights, call) and call.num_pairs <= few_pairs(weights)
    return ("batched_mm", "grouped_mm") if few else ("grouped_mm", "batched_mm")


def _measured(weights: ExpertWeights, call: Call) -> tuple[str, ...]:
    """By the table of this machine, fastest first; nothing where it has no such call."""
    if _nothing_measured() or not _static(weights, call):
        return ()
    return _by_table(*_key(weights, call))


def _static(weights: ExpertWeights, call: Call) -> bool:
    """Whether a choice by sizes is free: while compiling T may be symbolic, and choosing would cost a graph a side."""
    if not call.compiling:
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all(has_static_value(size) for size in (call.num_tokens, call.top_k, *weights.down.sizes))


def _key(weights: ExpertWeights, call: Call) -> tuple[Any, ...]:
    """What times depend on, as constants."""
    graph = call.capturing or call.compiling
    layout = weights.format, weights.down.transposed, weights.down.sizes
    return call.num_tokens, call.top_k, call.device, call.dtype, *layout, call.needs_grad, graph


def _nothing_measured() -> bool:
    return not timings.table()


def _by_table(*key: Any) -> tuple[str, ...]:
    return _ordered(*key, torch.get_num_threads())


# What torch._dynamo.assume_constant_result does, without importing all of torch._dynamo with moetor.
_nothing_measured._dynamo_marked_constant = True  # type: ignore[attr-defined]
_by_table._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _ordered(num_tokens: int, *rest: Any) -> tuple[str, ...]:
    *kind, _threads = rest
    entry = _entry(*kind)
    return tuple(entry.expected_us(num_tokens)) if entry else ()


def _entry(
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    format: str,
    transposed: bool,
    sizes: tuple[int, int, int],
    training: bool,
    graph: bool,
) -> timings.Entry | None:
    E, H, I = sizes
    name, word = timings.device_name(device), str(dtype).removeprefix("torch.")
    return timings.lookup(timings.Kind(name, word, format, (E, top_k, H, I), transposed, training, graph))


# a new table is another order
timings.ON_CHANGE.append(_ordered.cache_clear)


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    call = describe_call(weights, hidden_states, top_k_index, top_k_weights)
    return choose(weights, call).forward(weights, hidden_states, top_k_index, top_k_weights)


def how(weights: ExpertWeights, call: Call) -> str:
    """Whose times it chooses by, and which it expects."""
    num_tokens, *kind = _key(weights, call)
    entry = _entry(*kind)
    if entry is None:
        return "by moetor's defaults; `moetor tune` measures this machine"
    expected = ", ".join(f"{name} {time_us:.4g} µs" for name, time_us in entry.expected_us(num_tokens).items())
    within = "" if entry.tokens[0] <= num_tokens <= entry.tokens[-1] else f" at {entry.nearest(num_tokens)} tokens"
    return f"by what `moetor tune` measured on {entry.date[:10]}: {expected or 'nothing'}{within}"


BACKEND = Backend("auto", forward, choose=choose, how=how, summary="the best of the others for each call; says which")
