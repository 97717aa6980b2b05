"""The decode phase where it is meant for: nothing is forced, the model is on a GPU."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

import moetor
from moetor.backends import auto
from moetor.core.cost import bytes_per_expert
from moetor.integrations.transformers import experts_of, without_decode_switch

from .models import K, build, tokens
from .phases import Criterion, Ran
from .test_decode import MODES, SWITCHED

pytestmark = pytest.mark.gpu


def make(name: str = "qwen3_moe", dtype: torch.dtype = torch.float32, choice: object = "grouped_mm") -> PreTrainedModel:
    return moetor.attach(build(name).to("cuda", dtype), choice)


def generate(model: PreTrainedModel, batch: int = 2, **options: object) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(tokens()[:batch].cuda(), **options)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_a_fixed_backend(mode: str, ran: Ran) -> None:
    # in float32, so that both round alike wherever a token is decided
    model, batch = make(), 1 if mode == "prompt lookup" else 2
    options = {**MODES[mode], "disable_compile": True}
    expected = []
    for name in ("batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        with without_decode_switch():
            expected.append(generate(model, batch, **options))
        assert ran.names() == [name]
    found = generate(model, batch, **options)
    assert ran.names() == SWITCHED
    assert torch.equal(found, expected[0])
    assert torch.equal(found, expected[1])
    assert model.get_experts_implementation() == {"": "grouped_mm"}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe", "gpt_oss"])
def test_backends_of_both_phases_run_in_bfloat16(name: str, ran: Ran) -> None:
    model = make(name, torch.bfloat16)
    criterion = Criterion(lambda: model.get_experts_implementation()[""])
    generate(model, stopping_criteria=[criterion])
    assert ran.names() == SWITCHED
    assert criterion.seen == ["batched_mm"] * 5
    assert "while generate decodes: batched_mm up to" in str(model.explain_experts())


def test_assisted_generation_gives_the_tokens_of_greedy(ran: Ran) -> None:
    model, assistant = make(), make("mixtral")
    assistant.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    expected = generate(model, 1)
    for part in (model, assistant):
        ran.take()
        assert torch.equal(generate(model, 1, assistant_model=assistant), expected)
        assert ran.names(part) == SWITCHED


def test_bytes_gathered_decide_too(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(dtype=torch.bfloat16)
    expert_bytes = bytes_per_expert(experts_of(model.model.layers[0].mlp.experts))
    monkeypatch.setattr(auto, "GATHERED_BYTES", K * expert_bytes)
    for batch, names in ((1, SWITCHED), (2, ["grouped_mm"])):
        generate(model, batch)
        assert ran.names() == names


def test_model_on_the_cpu_of_a_machine_with_a_gpu_does_not_switch(ran: Ran) -> None:
    model = make().cpu()
    model.generate(tokens(), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert ran.names() == ["grouped_mm"]


@pytest.mark.parametrize("choice", ["grouped_mm", "auto"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_decoding_that_transformers_compiles(choice: str, mode: str) -> None:
    from transformers import CompileConfig

    torch._dynamo.reset()
    model = make(choice=choice)
    options = {"cache_implementation": "static"}
    expected = generate(copy.deepcopy(model), disable_compile=True, **options)
    config = CompileConfig(fullgraph=True, mode=mode)
    for _ in range(2):
        assert torch.equal(generate(model, compile_config=config, **options), expected)
    assert model.get_experts_implementation() == {"": choice}
    torch._dynamo.reset()


def test_plain_transformers_switches_too(ran: Ran) -> None:
    model = build("qwen3_moe").cuda()
    model.set_experts_implementation("moetor:grouped_mm")
    generate(model)
    assert ran.names() == SWITCHED
