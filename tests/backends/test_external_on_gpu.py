"""The real kernels of others, where they are installed: values at full size, sentinels, graphs, tracing, the contract.

They compile at run time, tens of seconds for a new shape (SonicMoE minutes): run this file with a generous timeout.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moetor import ExpertsInterface, ExpertWeights, Weight, experts_forward
from moetor.kernels.external import buffers
from moetor.quantization import quantize_experts
from moetor.testing import Case, check_case, contract_cases, prime_memory, relative_error, runnable
from moetor.testing.cases import EVERYTHING

pytestmark = pytest.mark.gpu

# E, K, H, I
Q15, Q30 = (60, 4, 2048, 1408), (128, 8, 2048, 768)
CUDA = torch.device("cuda")
KINDS = [
    ("deepgemm", "dense"),
    ("deepgemm", "fp8"),
    ("deepgemm", "fp8_e8m0"),
    ("deepgemm_megamoe", "fp8"),
    ("sonicmoe", "dense"),
]
# From float64 on the same weights. Dense: rows and inner activations are rounded once each. FP8: what rounding
# activations to e4m3 costs is 6.4e-2, and Mega MoE's groups of 64 columns a little less.
ALLOWED = {"dense": 5e-3, "fp8": 7e-2, "fp8_e8m0": 9e-2}


@pytest.fixture(autouse=True)
def _no_buffers_left() -> Iterator[None]:
    yield
    buffers.free_buffers()


def needs(backend: str) -> None:
    if reason := ExpertsInterface[backend].machine_why_not(CUDA):
        pytest.skip(reason)


def layer(shape: tuple[int, int, int, int], backend: str, format: str) -> tuple[ExpertWeights, ExpertWeights]:
    """Random dense weights, and the same in a format, laid out for a backend."""
    E, _, H, I = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    up = torch.randn(E, 2 * I, H, generator=generator, device="cuda").mul_(H**-0.5).bfloat16()
    down = torch.randn(E, H, I, generator=generator, device="cuda").mul_(I**-0.5).bfloat16()
    dense = ExpertWeights(Weight(up), Weight(down))
    if format == "dense":
        return dense, dense
    return dense, ExpertsInterface.prepare(quantize_experts(dense, format), backend)


def inputs(shape: tuple[int, int, int, int], tokens: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
    E, K, H, _ = shape
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16()
    ids = torch.rand(tokens, E, generator=generator, device="cuda").topk(K).indices
    if routing == "one expert":
        ids[:] = E - 2
    elif routing == "sentinels":
        ids[::2, 0], ids[1::3, -1], ids[2::5] = -1, E, -1
    return x, ids, torch.rand(tokens, K, generator=generator, device="cuda")


def skip_refused(weights: ExpertWeights, call: tuple[Tensor, ...], backend: str) -> None:
    from moetor.core.interface import describe_call

    if reason := ExpertsInterface[backend].why_not(weights, describe_call(weights, *call)):
        pytest.skip(reason)


@pytest.mark.parametrize("shape", [Q15, Q30], ids=["Q15", "Q30"])
@pytest.mark.parametrize(("backend", "format"), KINDS)
@torch.no_grad()
def test_values_at_full_size(backend: str, format: str, shape: tuple[int, int, int, int]) -> None:
    needs(backend)
    if backend == "deepgemm_megamoe" and shape[3] % 256:
        pytest.skip("needs I a multiple of 256")
    dense, weights = layer(shape, backend, format)
    wide = dense.map(lambda tensor: tensor.double())
    for tokens, routing in ((0, ""), (1, ""), (19, ""), (512, ""), (4096, ""), (300, "one expert"), (64, "sentinels")):
        call = inputs(shape, tokens, routing)
        skip_refused(weights, call, backend)
        prime_memory("cuda")
        got = experts_forward(weights, *call, backend)
        assert torch.equal(got, experts_forward(weights, *call, backend)), (tokens, routing)
        expected = experts_forward(wide, call[0].double(), *call[1:], "eager")
        assert relative_error(got, expected) <= ALLOWED[format], (tokens, routing)
        assert not got[(call[1] < 0).all(1)].any()


SMALL = (8, 2, 512, 256)
IN_GRAPHS = [kind for kind in KINDS if kind[1] != "fp8_e8m0"]


@pytest.mark.parametrize(("backend", "format"), IN_GRAPHS)
@torch.no_grad()
def test_captured_without_a_host_sync_and_replayed_with_other_routing(backend: str, format: str) -> None:
    needs(backend)
    _, weights = layer(SMALL, backend, format)
    call = inputs(SMALL, 64, "")
    experts_forward(weights, *call, backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts_forward(weights, *call, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = experts_forward(weights, *call, backend)
    for routing in ("sentinels", "one expert", ""):
        call[1].copy_(inputs(SMALL, 64, routing)[1])
        prime_memory("cuda")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, experts_forward(weights, *call, backend)), routing


@pytest.mark.parametrize(("backend", "format"), IN_GRAPHS)
@torch.no_grad()
def test_compiles_to_one_graph(backend: str, format: str) -> None:
    needs(backend)
    torch._dynamo.reset()
    _, weights = layer(SMALL, backend, format)
    call = inputs(SMALL, 64, "")
    compiled = torch.compile(lambda *call: experts_forward(weights, *call, backend) * 1, fullgraph=True)
    assert torch.equal(compiled(*call), experts_forward(weights, *call, backend))


CONTRACT = [
    replace(case, frozen=EVERYTHING, hidden=64, intermediate=64)
    for case in contract_cases()
    if case.dtype == torch.bfloat16 and case.format == "dense"
]


@pytest.mark.parametrize("case", list(dict.fromkeys(CONTRACT)), ids=str)
def test_contract_of_deepgemm(case: Case) -> None:
    needs("deepgemm")
    found, reason = runnable("deepgemm", case, "cuda")
    if found is None:
        pytest.skip(reason or "")
    problems, _ = check_case("deepgemm", found)
    assert not problems, problems
