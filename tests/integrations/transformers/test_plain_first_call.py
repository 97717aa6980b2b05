"""A model that moetor meets first while it is traced: nobody attached it, and nobody called it before."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from moetor.integrations.transformers.adapters import facts_of, is_experts

from .compare import relative_error
from .models import build, logits, tokens


def unseen(name: str) -> PreTrainedModel:
    model = build(name)
    model.set_experts_implementation("moetor")
    return model


@pytest.fixture
def compiler() -> Iterator[object]:
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


# a plain gate; clamps, interleaved and transposed, with biases; no gate
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", pytest.param("nemotron_h", marks=pytest.mark.slow)])
@torch.no_grad()
def test_compiles_to_one_graph_that_knows_the_gate(name, compiler):
    model = unseen(name)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = compiler(model, fullgraph=True, backend=keep)
    for _ in range(2):
        found = compiled(input_ids=tokens(), use_cache=False).logits
        assert len(graphs) == 1
    # recognised, as in a call that is not traced, and not taken for a function of the model's own
    assert all(facts_of(module).activation is not None for module in model.modules() if is_experts(module))
    assert relative_error(found, logits(model, tokens())) <= 1e-5
    plain = build(name)
    plain.load_state_dict(model.state_dict())
    assert relative_error(found, logits(plain, tokens())) <= 1e-5


# transformers' own note of outputs to collect
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_exports(strict):
    model = unseen("gpt_oss")
    program = torch.export.export(model, (), {"input_ids": tokens(), "use_cache": False}, strict=strict)
    found = program.module()(input_ids=tokens(), use_cache=False).logits
    assert relative_error(found, logits(model, tokens())) <= 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_layer_by_layer(compiler):
    model = unseen("qwen3_moe")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    found = logits(model, tokens())
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    assert relative_error(found, logits(model, tokens())) <= 1e-5


def test_parts_that_moetor_does_not_know_are_named(compiler):
    model = unseen("qwen3_moe")
    model.model.layers[1].mlp.experts.odd = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(
        Exception, match=r"Qwen3MoeExperts does not have the parts that its flags tell: unknown \['odd'\]"
    ):
        compiler(model, fullgraph=True, backend="eager")(input_ids=tokens(), use_cache=False)
