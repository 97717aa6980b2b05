"""Kernels of others through moetor, beside `fused` and beside DeepGEMM's two products alone, on the same tensors.

usage: python measure.py [--warm] [Q15|Q30 ...]

Each result is checked against a float64 loop before it is timed: the products of dense weights against these, FP8
against the loop that rounds as the format says, too. --warm compiles what will be timed, and times nothing.
"""

import statistics
import sys
from collections.abc import Callable

import torch

from moetor import ExpertsInterface, ExpertWeights, Weight, experts_forward
from moetor.kernels.deepgemm_experts import op
from moetor.kernels.deepgemm_experts.layout import pad_by_expert
from moetor.kernels.external.packages import loaded
from moetor.kernels.external.requirements import DEEP_GEMM
from moetor.quantization import quantize_experts

SHAPES = {"Q15": (60, 4, 2048, 1408), "Q30": (128, 8, 2048, 768)}
TOKENS = (1, 64, 512, 4096, 16384)
SILU = ("silu", True, 1.0, None, False, 0.0, None, None)


def time_us(fn: Callable[[], object], runs: int = 25) -> tuple[float, float, float]:
    """Median and quartiles."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, low, high


def captured(fn: Callable[[], object]) -> Callable[[], None]:
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def bare(weights: ExpertWeights, x: torch.Tensor, ids: torch.Tensor) -> Callable[[], None]:
    """The two products of a layer on rows that are laid out already."""
    library, up, down = loaded(DEEP_GEMM), weights.ups[0], weights.down
    order = pad_by_expert(ids, weights.num_experts, library.get_mk_alignment_for_contiguous_layout())
    rows = op._spread_tokens(x, ids, order, weights.num_experts, up.scale)
    product = op._product(library, rows, up.data, up.scale, order)
    inner = op._gated(product, None, order, False, SILU, down.scale)

    def run() -> None:
        op._product(library, rows, up.data, up.scale, order)
        op._product(library, inner, down.data, down.scale, order)

    return run


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@torch.no_grad()
def main(names: list[str], warm: bool) -> None:
    for name in names:
        E, K, H, I = SHAPES[name]
        generator = torch.Generator(device="cuda").manual_seed(0)
        up = torch.randn(E, 2 * I, H, generator=generator, device="cuda").mul_(H**-0.5).bfloat16()
        down = torch.randn(E, H, I, generator=generator, device="cuda").mul_(I**-0.5).bfloat16()
        dense = ExpertWeights(Weight(up), Weight(down))
        fp8 = quantize_experts(dense, "fp8")
        candidates = [("fused", dense), ("deepgemm", dense), ("sonicmoe", dense), ("fused", fp8), ("deepgemm", fp8)]
        if not I % 256 and not ExpertsInterface["deepgemm_megamoe"].machine_why_not(up.device):
            candidates.append(("deepgemm_megamoe", ExpertsInterface.prepare(fp8, "deepgemm_megamoe")))
        wide = dense.map(lambda tensor: tensor.double())
        for tokens in TOKENS:
            x = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16()
            ids = torch.rand(tokens, E, generator=generator, device="cuda").topk(K).indices
            call = x, ids, torch.rand(tokens, K, generator=generator, device="cuda")
            exact = rounded = None
            if not warm:
                exact = experts_forward(wide, x.double(), *call[1:], "eager")
                rounded = experts_forward(fp8, x.double(), *call[1:], "eager")
            if not ExpertsInterface["deepgemm"].machine_why_not(up.device):
                for label, weights in (("bf16", dense), ("fp8", fp8)):
                    products = bare(weights, x, ids)
                    if not warm:
                        middle, low, high = time_us(products)
                        cells = f"two products | {middle:.0f} ({low:.0f} to {high:.0f}) | | |"
                        print(f"| {name} | {tokens} | {label} | {cells}")
            for backend, weights in candidates:
                one(name, tokens, backend, weights, call, exact, rounded)


def one(name, tokens, backend, weights, call, exact, rounded) -> None:
    """One row; a reason in place of times where there are none."""
    label = "fp8" if weights.quantized else "bf16"
    row = f"| {name} | {tokens} | {label} | {backend} |"
    try:
        run = lambda: experts_forward(weights, *call, backend)  # noqa: E731
        got = run()
        if exact is None:
            return
        off = f"{error(got, exact):.1e}" + (f", {error(got, rounded):.1e}" if weights.quantized else "")
        times = [time_us(run), time_us(captured(run))]
        cells = [f"{middle:.0f} ({low:.0f} to {high:.0f})" for middle, low, high in times]
        print(row, " | ".join(cells), f"| {off} |", flush=True)
    except Exception as reason:  # a refusal, or whatever a library raises, is a cell of the table
        if exact is not None:
            print(row, f"{type(reason).__name__}: {str(reason)[:200]} | | |", flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main([name for name in arguments if name in SHAPES] or list(SHAPES), "--warm" in arguments)
