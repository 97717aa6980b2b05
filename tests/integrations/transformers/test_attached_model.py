"""An attached model is still the model: copied, saved, differentiated, checkpointed and compiled as the plain one."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import moetor
from moetor.integrations.transformers.methods import ExpertsMethods

from .backends import ON_CPU
from .compare import gradient_errors, relative_error
from .models import build, logits, tokens


def pair(backend: str = "grouped_mm") -> tuple[nn.Module, nn.Module]:
    """A plain model and an attached one with the same weights."""
    plain = build("qwen3_moe")
    return plain, moetor.attach(copy.deepcopy(plain), backend)


def saved_with_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_with_torch,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copy_runs_as_the_original_and_chooses_for_itself(make_copy):
    _, model = pair()
    other = make_copy(model)
    assert type(other) is type(model)
    assert other.get_experts_implementation() == {"": "grouped_mm"}
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    other.set_experts_implementation("batched_mm")
    other.model.layers[0].mlp.experts.down_proj.data.zero_()
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    assert not torch.equal(logits(other, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copy_keeps_a_choice_at_three_levels(make_copy):
    model = moetor.attach(build("qwen3_omni_moe"), {"thinker_config": "batched_mm", "talker_config": "eager"})
    other = make_copy(model)
    assert other.get_experts_implementation() == model.get_experts_implementation()
    other.thinker.model.set_experts_implementation("grouped_mm")
    assert other.get_experts_implementation() != model.get_experts_implementation()


@pytest.mark.slow
def test_saved_model_runs_in_a_process_that_never_imported_moetor(tmp_path):
    _, model = pair("batched_mm")
    torch.save((model, tokens(), logits(model, tokens())), tmp_path / "model.pt")
    script = (
        "import sys, torch; model, ids, expected = torch.load(sys.argv[1], weights_only=False);"
        "assert torch.equal(model(input_ids=ids).logits, expected);"
        "assert model.get_experts_implementation() == {'': 'batched_mm'}"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.pt")], check=True)


def test_class_keeps_its_name_and_ancestors():
    plain, model = pair()
    assert isinstance(model, type(plain))
    assert isinstance(model.model, type(plain.model))
    assert (type(model).__name__, type(model).__module__) == (type(plain).__name__, type(plain).__module__)
    assert not isinstance(plain, ExpertsMethods)


def test_state_dict_is_that_of_the_plain_model():
    plain, model = pair()
    assert list(model.state_dict()) == list(plain.state_dict())
    for tensor in plain.state_dict().values():
        tensor.mul_(0.5)
    model.load_state_dict(plain.state_dict())
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5
    model.load_state_dict({name: tensor * 2 for name, tensor in plain.state_dict().items()}, assign=True)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) > 1e-2


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_saved_files_are_those_of_the_plain_model(tmp_path):
    plain, model = pair()
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "attached")
    assert contents(tmp_path / "attached") == contents(tmp_path / "plain")
    reloaded = moetor.AutoModelForCausalLM.from_pretrained(tmp_path / "attached", experts_implementation="grouped_mm")
    assert torch.equal(logits(reloaded, tokens()), logits(model, tokens()))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "attached", experts_implementation="eager")
    assert torch.equal(logits(back, tokens()), logits(plain, tokens()))


def test_saved_after_loading_is_as_it_was(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path / "first")
    moetor.AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first["model.safetensors"] == second["model.safetensors"]
    assert b"moetor" not in second["config.json"]


def test_config_object_of_the_user_is_left_as_transformers_leaves_it():
    config = build("qwen3_vl_moe").config
    parts = (config, config.text_config, config.vision_config)
    before = [dict(vars(part)) for part in parts]
    model = type(build("qwen3_vl_moe"))(config)
    moetor.attach(model, {"text_config": "batched_mm"}).set_experts_implementation("grouped_mm")
    assert [vars(part) for part in parts] == before


@pytest.mark.parametrize("choice", ["grouped_mm", {"text_config": "batched_mm"}], ids=str)
def test_config_object_given_to_from_pretrained_is_not_changed(tmp_path, choice):
    build("qwen3_vl_moe").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    parts = (config, config.text_config, config.vision_config)
    before = [dict(vars(part)) for part in parts]
    moetor.AutoModelForImageTextToText.from_pretrained(tmp_path, config=config, experts_implementation=choice)
    assert [vars(part) for part in parts] == before


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_functional_call_gives_outputs_and_gradients_of_the_parameters_it_is_given():
    plain, model = pair()
    given = {name: (1.1 * p).detach().requires_grad_() for name, p in plain.named_parameters()}
    keywords = {"input_ids": tokens(), "labels": tokens()}
    out = torch.func.functional_call(model, given, kwargs=keywords)
    found = dict(zip(given, torch.autograd.grad(out.loss, list(given.values())), strict=True))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.1)
    assert max(gradient_errors(found, gradients(plain)).values()) <= 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backend", ON_CPU)
def test_gradients_are_the_same_with_gradient_checkpointing(backend, use_reentrant):
    plain, model = pair(backend)
    # its second name is newer, and the first warns where both exist
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    runs = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda *_: runs.append(1))
    assert max(gradient_errors(gradients(model.train()), gradients(plain.train())).values()) <= 1e-5
    assert len(runs) == 2  # once forward, once again for the backward pass


@torch.no_grad()
def test_exported_program_gives_the_same_logits():
    plain, model = pair()
    program = torch.export.export(model, (), {"input_ids": tokens(), "use_cache": False})
    found = program.module()(input_ids=tokens(), use_cache=False).logits
    assert relative_error(found, logits(plain, tokens())) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", ON_CPU)
def test_offloaded_model_gives_the_same_logits(backend):
    accelerate = pytest.importorskip("accelerate")
    plain, model = pair(backend)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("backend", ON_CPU)
def test_logits_under_autocast_are_those_of_the_plain_model(backend):
    plain, model = pair(backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 2e-2


def test_weights_changed_after_attaching_are_used():
    plain, model = pair()
    for changed in (plain, model):
        changed.double()
        with torch.no_grad():
            changed.model.layers[1].mlp.experts.gate_up_proj.mul_(-1)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-12


@pytest.fixture
def compiler():
    """torch.compile without what an earlier test left."""
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm"])
@torch.no_grad()
def test_compiles_to_one_graph_and_a_switch_is_followed(backend, compiler, zeros):
    plain, model = pair(backend)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = compiler(model, fullgraph=True, backend=count)
    expected = logits(plain, tokens())
    assert relative_error(compiled(input_ids=tokens(), use_cache=False).logits, expected) <= 1e-5
    assert len(graphs) == 1
    model.set_experts_implementation(zeros)
    silenced = logits(model, tokens())
    assert relative_error(silenced, expected) > 1e-2
    assert relative_error(compiled(input_ids=tokens(), use_cache=False).logits, silenced) <= 1e-5
    model.set_experts_implementation(backend)
    assert relative_error(compiled(input_ids=tokens(), use_cache=False).logits, expected) <= 1e-5
    assert len(graphs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm"])
def test_compiled_training_step_is_that_of_the_plain_model(backend, compiler):
    plain, model = pair(backend)
    compiled = compiler(model, fullgraph=True)
    loss = compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(gradient_errors(found, gradients(plain)).values()) <= 1e-5
