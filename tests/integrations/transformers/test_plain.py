"""Plain transformers with `experts_implementation="moetor"`: nobody attached the model, and moetor runs its experts."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import moetor
from moetor import ExpertsInterface
from moetor.integrations.transformers import without_decode_switch
from moetor.integrations.transformers.adapters import is_decorated
from moetor.integrations.transformers.choice import backend_of

from .backends import ON_CPU
from .compare import relative_error
from .models import CONFIGS, build, logits, set_limits, tokens

TINY = Path(moetor.__file__).parent / "assets" / "tiny"


def auto_classes() -> Iterator[Any]:
    """Every Auto class of transformers with each of our architectures that it knows."""
    configs = {name: make() for name, make in CONFIGS.items()}
    for name in dir(transformers):
        cls = getattr(transformers, name) if name.startswith("AutoModel") else None
        for architecture, config in configs.items() if hasattr(cls, "_model_mapping") else ():
            if type(config) in cls._model_mapping:
                yield pytest.param(cls, architecture, id=f"{name}-{architecture}")


AUTO_CLASSES = list(auto_classes())


def first_output(model: nn.Module) -> torch.Tensor:
    """Logits, or hidden states where there is no head; the omni model has no forward of its own."""
    model = getattr(model, "thinker", model)
    return model(input_ids=tokens()[:1]).to_tuple()[0]


def twin(model: PreTrainedModel, choice: object) -> PreTrainedModel:
    """The same weights in a plain model that was built with this choice."""
    config = copy.deepcopy(model.config)
    other = type(model)._from_config(config, experts_implementation=choice).eval()
    other.load_state_dict(model.state_dict())
    set_limits(other)
    return other


@pytest.mark.parametrize(("cls", "architecture"), AUTO_CLASSES)
@torch.no_grad()
def test_every_auto_class(cls, architecture, ran):
    config = CONFIGS[architecture]()
    config.num_labels = 3
    model = cls.from_config(config, experts_implementation="moetor").eval()
    if not any(is_decorated(module) for module in model.modules()):
        pytest.skip(f"this release of transformers has no interface for the experts of {architecture}")
    found = first_output(model)
    assert set(ran.names()) == {"fused"}  # auto on a CPU
    expected = first_output(twin(model, "eager"))
    assert ran.names() == []
    assert relative_error(found, expected) <= 1e-5


def test_that_test_reaches_the_classes_with_and_without_a_head():
    names = {parameter.id.split("-")[0] for parameter in AUTO_CLASSES}
    assert {"AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"} <= names
    assert {"AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForTokenClassification"} <= names


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_backend_is_named_after_a_colon(backend, ran):
    plain = build("gpt_oss")
    model = twin(plain, f"moetor:{backend}")
    found = logits(model, tokens())
    assert ran.names() == ["fused" if backend == "auto" else backend]
    assert relative_error(found, logits(plain, tokens())) <= 1e-5


def test_name_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="moetor:grouped_mm"):
        AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"](), experts_implementation="moetor:gruped_mm")
    assert {f"moetor:{name}" for name in ON_CPU} <= set(transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS)


@torch.no_grad()
def test_saved_files_do_not_know_of_it_and_load_either_way(tmp_path, ran):
    plain = build("qwen3_moe")
    plain.save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", experts_implementation="moetor:batched_mm")
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path / "moetor")
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "moetor" / file.name).read_bytes() == file.read_bytes()
    ran.take()
    for choice, name in (("moetor:batched_mm", "batched_mm"), ("moetor", "fused")):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "moetor", experts_implementation=choice)
        torch.testing.assert_close(logits(again, tokens()), expected, rtol=1e-5, atol=1e-5)
        assert ran.names() == [name]


@torch.no_grad()
def test_choice_at_run_time_is_followed(ran):
    model = build("qwen3_moe")
    expected = logits(model, tokens())
    for choice, names in (
        ("moetor", ["fused"]),
        ("moetor:eager", ["eager"]),
        ("eager", []),
        ("moetor", ["fused"]),
    ):
        model.set_experts_implementation(choice)
        assert model.get_experts_implementation() == {"": choice}
        assert relative_error(logits(model, tokens()), expected) <= 1e-5
        assert ran.names() == names


@pytest.mark.parametrize(
    "choice", ["moetor", {"text_config": "moetor"}, {"": "eager", "text_config": "moetor"}], ids=str
)
@torch.no_grad()
def test_nested_config(choice, tmp_path, ran):
    plain = build("qwen3_vl_moe")
    plain.save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, experts_implementation=choice)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5
    assert ran.names() == ["fused"]
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "again", experts_implementation=choice)
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


@torch.no_grad()
def test_config_of_three_levels():
    plain = build("qwen3_omni_moe")
    plain.set_experts_implementation("eager")
    model = twin(
        plain, {"": "eager", "thinker_config": {"text_config": "moetor:batched_mm"}, "talker_config": "moetor"}
    )
    running = [{backend_of(module) for module in part.modules() if is_decorated(module)} for part in model.children()]
    assert [names for names in running if names] == [{"batched_mm"}, {"auto"}]
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5


def test_decode_phase_holds(decodes, ran):
    plain = build("qwen3_moe")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    model = twin(plain, "moetor:grouped_mm")
    with without_decode_switch():
        expected = model.generate(tokens(), **options)
    assert ran.names() == ["grouped_mm"]
    for beams in (1, 2):
        found = model.generate(tokens(), num_beams=beams, **options)
        assert ran.names() == ["grouped_mm", "batched_mm"]
        if beams == 1:
            assert torch.equal(found, expected)
    assert model.get_experts_implementation() == {"": "moetor:grouped_mm"}
    assert torch.equal(twin(plain, "moetor:eager").generate(tokens(), **options), expected)
    assert ran.names() == ["eager"]


@pytest.mark.parametrize("choice", [{"": "eager", "text_config": "moetor:grouped_mm"}, "moetor:grouped_mm"], ids=str)
def test_decode_phase_holds_in_a_nested_config(choice, decodes, ran):
    model = twin(build("qwen3_vl_moe"), choice)
    model.generate(tokens(), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert ran.names() == ["grouped_mm", "batched_mm"]


def test_pipeline(ran):
    chat = transformers.pipeline(
        "text-generation", model=str(TINY), device="cpu", model_kwargs={"experts_implementation": "moetor:batched_mm"}
    )
    plain = transformers.pipeline(
        "text-generation", model=str(TINY), device="cpu", model_kwargs={"experts_implementation": "eager"}
    )
    assert ran.names() == []
    said = [each("def add(a, b):", max_new_tokens=8, do_sample=False)[0]["generated_text"] for each in (chat, plain)]
    assert ran.names() == ["batched_mm"]
    assert said[0] == said[1]


@torch.no_grad()
def test_plain_model_can_be_attached_and_then_chooses_by_attach(ran):
    model = twin(build("qwen3_moe"), "moetor:eager")
    logits(model, tokens())
    assert ran.names() == ["eager"]
    moetor.attach(model, "batched_mm")
    logits(model, tokens())
    assert ran.names() == ["batched_mm"]
    assert model.get_experts_implementation() == {"": "batched_mm"}


def test_backends_of_ours_all_have_a_name_there():
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    ours = {name for name in functions if name.startswith("moetor:")}
    assert ours == {f"moetor:{name}" for name in ExpertsInterface.names()}
