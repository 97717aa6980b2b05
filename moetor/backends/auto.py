"""The best backend that can run a call: a policy, not a way to compute."""

from torch import Tensor

from ..core.cost import bytes_per_expert
from ..core.interface import Backend, Call, ExpertsInterface, describe_call
from ..core.weights import ExpertWeights
from . import batched_mm

# On an H200 gathering 66 MiB wins over sorting, 106 to 339 µs; 672 MiB loses, 547 to 382.
GATHERED_BYTES = 256 * 2**20
# Ahead of transformers' own backends at every size in benchmarks/2026-12-01-layer-forward-h200, 1 to 16384 tokens.
FIRST_ON_CUDA = ("fused",)


def few_pairs(weights: ExpertWeights) -> int:
    """The most pairs for which, on a GPU, gathering their matrices (batched_mm) beats sorting them (grouped_mm).

    Within it batched_mm runs whatever grouped_mm runs: its own bound is kept.
    """
    return int(min(GATHERED_BYTES, batched_mm.GATHER_BYTES) / bytes_per_expert(weights))


def order_of_trial(weights: ExpertWeights, call: Call) -> tuple[str, ...]:
    """Names of our backends, best first, whether or not they can run."""
    if call.device.type == "cpu":
        return ("fused", "grouped_mm", "eager")
    # While compiling, T may be symbolic: a choice by size would cost a graph for each side.
    few = not call.compiling and call.num_pairs <= few_pairs(weights)
    rest = ("batched_mm", "grouped_mm", "eager") if few else ("grouped_mm", "batched_mm", "eager")
    return FIRST_ON_CUDA + rest


def choose(weights: ExpertWeights, call: Call) -> Backend:
    """The first that gives no reason against the call; eager, whose own error is best, if all do."""
    for name in order_of_trial(weights, call):
        backend = ExpertsInterface[name]
        if backend.refusal(weights, call) is None:
            return backend
    return ExpertsInterface["eager"]


def forward(weights: ExpertWeights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    call = describe_call(weights, hidden_states, top_k_index, top_k_weights)
    return choose(weights, call).forward(weights, hidden_states, top_k_index, top_k_weights)


BACKEND = Backend("auto", forward, choose=choose, summary="the best of the others for each call; says which")
