"""What only a GPU shows: large tiles, 64-bit offsets, captured graphs, compiled calls, host syncs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moetor import ExpertsInterface, ExpertWeights, Weight, experts_forward
from moetor.testing import Case, check_case, make_inputs, oracle, prime_memory, relative_error
from moetor.testing.cases import EVERYTHING
from moetor.testing.contract import run

pytestmark = pytest.mark.gpu

# Enough rows for every tile of the fused kernels: an expert's average is tokens · top_k / experts.
LARGE = Case(tokens=1024, experts=4, hidden=256, intermediate=192, dtype=torch.bfloat16)
CAPTURED = ("fused", "grouped_mm", "batched_mm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts": 12},
        {"experts": 20},
        {"experts": 1, "top_k": 1},
        {"layout": "transposed", "bias": True},
        {"layout": "interleaved", "gate": "gpt_oss", "bias": True},
        {"layout": "pair", "bias": True},
        {"layout": "strided"},
        {"layout": "unaligned"},
        {"gated": False, "gate": "relu2"},
        {"hidden": 250, "intermediate": 99},
        {"routing": "one_expert"},
        {"routing": "sentinels"},
        {"tokens": 5000, "experts": 130, "top_k": 8},
    ],
    ids=lambda changes: str(replace(LARGE, **changes)),
)
def test_fused_is_right_in_large_tiles(changes: dict, dtype: torch.dtype) -> None:
    problems, _ = check_case("fused", make_inputs(replace(LARGE, dtype=dtype, **changes), "cuda"))
    assert not problems, problems


def test_fused_reads_interleaved_rows_stored_transposed_as_gpt_oss_does() -> None:
    inputs = make_inputs(replace(LARGE, layout="interleaved", gate="gpt_oss", bias=True), "cuda")
    up = inputs.weights.ups[0]
    assert isinstance(up.data, Tensor)
    stored = up.data.detach().transpose(1, 2).contiguous().requires_grad_()
    turned = replace(up, data=stored, transposed=True)
    inputs = replace(inputs, weights=replace(inputs.weights, up=turned))
    for tokens in (1024, 3):
        few = replace(
            inputs,
            hidden_states=inputs.hidden_states[:tokens].detach().requires_grad_(),
            top_k_index=inputs.top_k_index[:tokens],
            top_k_weights=inputs.top_k_weights[:tokens].detach().requires_grad_(),
        )
        problems, _ = check_case("fused", few)
        assert not problems, problems


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [2, 19, 1024])
def test_fused_is_as_exact_as_grouped_mm(tokens: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(replace(LARGE, tokens=tokens, dtype=dtype), "cuda")
    expected, _ = oracle(inputs, inputs.hidden_states)
    errors = {}
    for backend in ("fused", "grouped_mm"):
        result, _ = run(backend, inputs, torch.ones_like(inputs.hidden_states))
        errors[backend] = relative_error(result, expected)
    assert errors["fused"] <= 1.2 * errors["grouped_mm"]


@pytest.mark.parametrize("backend", ["fused", "grouped_mm", "batched_mm", "eager"])
def test_o3_weights_beyond_2_to_the_31_elements(backend: str) -> None:
    E, H, I, T = 512, 4096, 1024, 64
    up = torch.empty(E, 2 * I, H, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(E, H, I, dtype=torch.bfloat16, device="cuda")
    chosen = (0, 255, 256, 257, 511)
    for expert in chosen:
        up[expert].normal_(std=H**-0.5)
        down[expert].normal_(std=I**-0.5)
    x = torch.randn(T, H, device="cuda").bfloat16()
    ids = torch.tensor(chosen, device="cuda")[torch.rand(T, 5, device="cuda").topk(2).indices]
    routing = torch.rand(T, 2, device="cuda")
    weights = ExpertWeights(Weight(up.requires_grad_()), Weight(down.requires_grad_()))
    result = experts_forward(weights, x, ids, routing, backend)
    upstream = torch.randn_like(result)
    expected = torch.zeros(T, H, dtype=torch.float64, device="cuda")
    result.backward(upstream)
    for expert in chosen:
        token, slot = (ids == expert).nonzero(as_tuple=True)
        w_up, w_down = (w[expert].detach().double().requires_grad_() for w in (up, down))
        gate, upper = (x[token].double() @ w_up.T).chunk(2, dim=-1)
        rows = torch.nn.functional.silu(gate) * upper @ w_down.T * routing[token, slot, None].double()
        expected.index_add_(0, token, rows.detach())
        wanted = torch.autograd.grad(rows, (w_up, w_down), upstream[token].double())
        assert relative_error(up.grad[expert], wanted[0]) <= 2e-2
        assert relative_error(down.grad[expert], wanted[1]) <= 2e-2
    others = torch.ones(E, dtype=torch.bool, device="cuda")
    others[list(chosen)] = False
    assert not any(gradient[others].any() for gradient in (up.grad, down.grad))
    assert relative_error(result.detach(), expected) <= 1e-2


@pytest.mark.parametrize("backend", CAPTURED)
def test_o11_replays_with_new_routing_padding_and_weights(backend: str) -> None:
    E, K, T, real = 8, 2, 32, 19
    layers = [
        make_inputs(Case(tokens=T, experts=E, dtype=torch.bfloat16, frozen=EVERYTHING, seed=s), "cuda") for s in (1, 2)
    ]
    pool, graphs, results = torch.cuda.graph_pool_handle(), [], []

    def call(layer) -> Tensor:
        return experts_forward(layer.weights, layer.hidden_states, layer.top_k_index, layer.top_k_weights, backend)

    for layer in layers:
        call(layer)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results.append(call(layer))
        graphs.append(graph)
    generator = torch.Generator(device="cuda").manual_seed(3)
    for replay in range(12):
        for layer, graph, result in zip(layers, graphs, results, strict=True):
            layer.hidden_states.copy_(torch.randn(T, 64, device="cuda", generator=generator))
            ids = torch.rand(T, E, device="cuda", generator=generator).topk(K).indices
            if replay == 5:
                ids[:] = torch.tensor([3, 6], device="cuda")
            ids[real:] = E if replay % 2 else -1
            layer.top_k_index.copy_(ids)
            if replay == 7:
                layer.weights.down.first.mul_(-2)
            prime_memory("cuda")
            graph.replay()
            torch.cuda.synchronize()
            assert not result[real:].any()
            assert torch.equal(result, call(layer))
            assert relative_error(result, oracle(layer, result)[0]) <= 1e-2


@pytest.mark.parametrize("gate", ["gpt_oss", "relu", "limit_after", "relu2"])
@pytest.mark.parametrize("tokens", [2, 19])
def test_nan_of_a_token_stays_in_its_result(gate: str, tokens: int) -> None:
    """Clamps of PyTorch keep a NaN; those of a GPU return the bound."""
    inputs = make_inputs(Case(tokens=tokens, gate=gate, dtype=torch.bfloat16, frozen=EVERYTHING), "cuda")
    inputs.hidden_states[1, 3] = torch.nan
    for backend in ("fused", "grouped_mm"):
        result = experts_forward(
            inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
        )
        assert result[1].isnan().all()
        assert not result[0].isnan().any()


@pytest.mark.parametrize("backend", CAPTURED)
def test_no_host_sync(backend: str) -> None:
    inputs = make_inputs(Case(tokens=64, dtype=torch.bfloat16), "cuda")
    upstream = torch.ones_like(inputs.hidden_states)
    run(backend, inputs, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = experts_forward(
            inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
        )
        if result.requires_grad:
            result.backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fused_compiles_to_one_graph(dtype: torch.dtype) -> None:
    torch._dynamo.reset()

    def call(up: Tensor, down: Tensor, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts_forward(ExpertWeights(Weight(up), Weight(down)), x, ids, routing, "fused") * 1

    compiled = torch.compile(call, fullgraph=True)
    for tokens in (0, 1, 7, 129):
        inputs = make_inputs(Case(tokens=tokens, dtype=dtype, frozen=EVERYTHING), "cuda")
        arguments = (*inputs.weights.tensors(), inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
        assert torch.equal(compiled(*arguments), call(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fused_compiles_to_one_graph_with_gradients(dtype: torch.dtype) -> None:
    torch._dynamo.reset()

    def call(up: Tensor, down: Tensor, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts_forward(ExpertWeights(Weight(up), Weight(down)), x, ids, routing, "fused") * 1

    compiled = torch.compile(call, fullgraph=True)
    for tokens in (0, 1, 7, 129):
        inputs = make_inputs(Case(tokens=tokens, dtype=dtype), "cuda")
        arguments = (*inputs.weights.tensors(), inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
        leaves = [argument for argument in arguments if argument.requires_grad]
        results = [run(*arguments) for run in (compiled, call)]
        assert torch.equal(*results)
        upstream = torch.randn_like(results[0])
        found = [torch.autograd.grad(result, leaves, upstream) for result in results]
        assert all(torch.equal(ours, eager) for ours, eager in zip(*found, strict=True))


def test_fused_trains_in_captured_graphs() -> None:
    """Forward and backward as torch.cuda.make_graphed_callables captures them, with other inputs at each replay."""
    T, E, K = 256, 8, 2
    inputs = make_inputs(Case(tokens=T, experts=E, hidden=256, intermediate=128, dtype=torch.bfloat16), "cuda")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (torch.nn.Parameter(t.detach().clone()) for t in inputs.weights.tensors())

        def forward(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
            return experts_forward(ExpertWeights(Weight(self.up), Weight(self.down)), x, ids, routing, "fused")

    layer, plain = Layer(), Layer()
    sample = (torch.randn(T, 256, device="cuda").bfloat16().requires_grad_(), inputs.top_k_index.clone(),
              torch.rand(T, K, device="cuda", requires_grad=True))  # fmt: skip
    graphed = torch.cuda.make_graphed_callables(layer, sample)
    for replay in range(4):
        x = torch.randn(T, 256, device="cuda").bfloat16().requires_grad_()
        ids = torch.rand(T, E, device="cuda").topk(K).indices
        ids[replay * 50 :] = E
        routing = torch.rand(T, K, device="cuda", requires_grad=True)
        upstream = torch.randn(T, 256, device="cuda").bfloat16()
        found = []
        for module in (graphed, plain):
            prime_memory("cuda")
            result = module(x, ids, routing)
            leaves = (x, routing, *(layer if module is graphed else plain).parameters())
            found.append([result, *torch.autograd.grad(result, leaves, upstream)])
        assert all(torch.equal(ours, eager) for ours, eager in zip(*found, strict=True))


def test_o3_activations_beyond_2_to_the_31_elements() -> None:
    """Rows of the last tokens lie past 2^31 elements, of x sorted and of its gradient."""
    E, T, K, H, I = 8, 131104, 8, 2048, 64
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    generator = torch.Generator(device="cuda").manual_seed(0)
    up = torch.randn(E, 2 * I, H, device="cuda", generator=generator).mul_(H**-0.5).bfloat16().requires_grad_()
    down = torch.randn(E, H, I, device="cuda", generator=generator).mul_(I**-0.5).bfloat16().requires_grad_()
    x = torch.randn(T, H, device="cuda", generator=generator).bfloat16().requires_grad_()
    ids = torch.arange(E, device="cuda").repeat(T, 1)
    routing = torch.rand(T, K, device="cuda", generator=generator).requires_grad_()
    result = experts_forward(ExpertWeights(Weight(up), Weight(down)), x, ids, routing, "fused")
    upstream = torch.randn(T, H, device="cuda", generator=generator).bfloat16()
    found = torch.autograd.grad(result, (x, routing), upstream)
    last = slice(T - 50, T)
    part = [t.detach()[last].clone().requires_grad_() for t in (x, routing)]
    few = experts_forward(ExpertWeights(Weight(up), Weight(down)), part[0], ids[last], part[1], "eager")
    wanted = torch.autograd.grad(few, part, upstream[last])
    assert relative_error(result.detach()[last], few.detach().double()) <= 1e-2
    for ours, eager in zip(found, wanted, strict=True):
        assert relative_error(ours[last], eager.double()) <= 2e-2


def test_auto_is_fused_in_inference_and_in_training() -> None:
    from moetor.core.interface import describe_call

    for frozen in (EVERYTHING, frozenset()):
        inputs = make_inputs(Case(tokens=2, dtype=torch.bfloat16, frozen=frozen), "cuda")
        call = describe_call(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
        assert ExpertsInterface.select(inputs.weights, call, "auto").name == "fused"
