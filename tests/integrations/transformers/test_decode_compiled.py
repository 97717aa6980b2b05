"""The decode phase under torch.compile: each phase has its graph, which serves every later call and no other thread."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.fx import GraphModule
from transformers import CompileConfig

from moetor.integrations.transformers import without_decode_switch
from moetor.integrations.transformers.adapters import is_experts

from .test_decode import generate, make

SORTED = "moetor.grouped_matmul"


class Graphs:
    """A backend of torch.compile that runs graphs as they are and keeps which products of experts are in them."""

    def __init__(self) -> None:
        self.products: list[str] = []

    def __call__(self, graph: GraphModule, inputs: object) -> GraphModule:
        targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        self.products.append("grouped_mm" if any(SORTED in target for target in targets) else "batched_mm")
        return graph

    def __deepcopy__(self, memo: object) -> "Graphs":
        return self  # generate copies its options


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_decoding_that_transformers_compiles(dynamic, decodes, graphs):
    model = make()
    options = {"cache_implementation": "static"}
    with without_decode_switch():
        expected = generate(model, disable_compile=True, **options)
    config = CompileConfig(fullgraph=True, backend=graphs, mode=None, dynamic=dynamic)
    config._compile_all_devices = True
    options["compile_config"] = config
    for _ in range(2):
        assert torch.equal(generate(model, **options), expected)
        assert graphs.products == ["batched_mm"]
    with without_decode_switch():
        assert torch.equal(generate(model, **options), expected)
    assert graphs.products == ["batched_mm", "grouped_mm"]
    assert torch.equal(generate(model, **options), expected)
    assert graphs.products == ["batched_mm", "grouped_mm"]


def test_forward_that_the_user_compiled_has_a_graph_for_each_phase(decodes, graphs):
    model = make()
    with without_decode_switch():
        expected = generate(model)
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs, dynamic=True)
    for _ in range(2):
        assert torch.equal(generate(model), expected)
        compiled = list(graphs.products)
        assert set(compiled) == {"grouped_mm", "batched_mm"}
    assert graphs.products == compiled
    assert compiled[0] == "grouped_mm"


def test_graph_of_a_phase_is_not_run_by_another_thread(decodes, graphs):
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=False)
    one = torch.tensor([[5]])

    @torch.no_grad()
    def call():
        compiled(input_ids=one, use_cache=False)
        return list(graphs.products)

    seen = []

    def look(*_, **__):
        seen.append(call())  # in the decode phase of this thread
        thread = threading.Thread(target=lambda: seen.append(call()))
        thread.start()
        thread.join()
        return torch.zeros(1, dtype=torch.bool)

    generate(model, 2, batch=1, stopping_criteria=[look])
    assert seen == [["batched_mm"]] + [["batched_mm", "grouped_mm"]] * 3
    assert call() == ["batched_mm", "grouped_mm"]


def test_layers_compiled_one_by_one_share_their_graphs(decodes, graphs):
    """Groups are the same in all layers, and nothing ties a graph to one of them."""
    model = make()
    expected = generate(model)
    for module in filter(is_experts, model.modules()):
        module.compile(fullgraph=True, backend=graphs, dynamic=True)
    assert torch.equal(generate(model), expected)
    assert graphs.products == ["grouped_mm", "batched_mm"]
