"""Models whose experts have no seam in transformers: copied, saved, offloaded, compiled as the plain ones."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import moetor
from moetor import InvalidInput
from moetor.integrations.transformers.adapters import SEAM, Sizes, adapter_of, experts_of, runner_of
from moetor.integrations.transformers.adapters.seam import Forward
from moetor.integrations.transformers.choice import experts_by_key

from .compare import gradient_errors, relative_error
from .models import auto_class, build, logits, tokens

accelerate = pytest.importorskip("accelerate")

NAMES = (
    "llama4",
    "dbrx",
    "longcat_flash",
    "jetmoe",
    "step3p7",
    "switch_transformers",
    "old_mixtral",
    "old_qwen2_moe",
    "old_deepseek",
)
LISTED = ("switch_transformers", "old_mixtral", "old_qwen2_moe", "old_deepseek")
every_model = pytest.mark.parametrize("name", NAMES)


def experts_in(model: nn.Module) -> list[nn.Module]:
    return [module for modules in experts_by_key(model).values() for module in modules]


def pair(name: str, backend: str = "auto") -> tuple[nn.Module, nn.Module]:
    """A plain model and an attached one with the same weights."""
    plain = build(name)
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


@every_model
def test_choice_is_seen_and_followed(name, zeros):
    _, model = pair(name)
    assert model.get_experts_implementation()[""] == "auto"
    before = logits(model, tokens())
    assert "-> fused" in str(model.explain_experts())
    model.set_experts_implementation(zeros)
    assert model.get_experts_implementation()[""] == "zeros"
    assert relative_error(logits(model, tokens()), before) > 1e-2
    model.set_experts_implementation("eager")
    assert relative_error(logits(model, tokens()), before) <= 1e-5


@every_model
@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copy_runs_as_the_original_and_by_itself(name, make_copy, zeros):
    _, model = pair(name)
    other = make_copy(model)
    assert all(runner_of(module) == SEAM for module in experts_in(other))
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    before = logits(model, tokens())
    other.set_experts_implementation(zeros)
    with torch.no_grad():
        for tensor in experts_of(experts_in(other)[0]).tensors():
            tensor.zero_()
    assert torch.equal(logits(model, tokens()), before)
    assert model.get_experts_implementation()[""] == "auto"


@every_model
def test_state_and_files_are_those_of_the_plain_model(name, tmp_path):
    plain, model = pair(name)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "attached")
    files = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "attached").iterdir()} == files


@every_model
def test_stacked_model_saves_the_same_files(name, tmp_path):
    if name not in LISTED:
        pytest.skip("its experts are stacked already")
    plain, model = pair(name, "grouped_mm")
    moetor.stack_experts(model)
    assert all(experts_of(module).stacked for module in experts_in(model))
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "stacked")
    files = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "stacked").iterdir()} == files
    assert all(experts_of(module).stacked for module in experts_in(saved_with_torch(model)))


def to_cpu(module: nn.Module, folder: str) -> None:
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))


def to_disk(module: nn.Module, folder: str) -> None:
    accelerate.disk_offload(module, folder, execution_device=torch.device("cpu"))


def offload_experts(model: nn.Module, offload: Callable[[nn.Module, str], None], folder: Path) -> None:
    """Only them: llama4, longcat_flash and jetmoe read other weights of theirs outside of accelerate's hooks."""
    for number, module in enumerate(experts_in(model)):
        offload(module, str(folder / str(number)))
        assert all(parameter.is_meta for parameter in module.parameters())


offloads = pytest.mark.parametrize("offload", [to_cpu, to_disk], ids=lambda offload: offload.__name__)


@every_model
@offloads
@torch.no_grad()
def test_offloaded_after_attaching_gives_the_same_logits(name, offload, tmp_path, zeros):
    plain, model = pair(name)
    offload_experts(model, offload, tmp_path)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5
    # gone from memory again, and moetor is not put aside
    assert all(parameter.is_meta for parameter in experts_in(model)[0].parameters())
    model.set_experts_implementation(zeros)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) > 1e-2


@every_model
@offloads
@torch.no_grad()
def test_attached_after_offloading_gives_the_same_logits(name, offload, tmp_path, zeros):
    plain = build(name)
    model = copy.deepcopy(plain)
    offload_experts(model, offload, tmp_path)
    moetor.attach(model)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5
    model.set_experts_implementation(zeros)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) > 1e-2
    accelerate.hooks.remove_hook_from_submodules(model)
    assert all(runner_of(module) == SEAM for module in experts_in(model))


# Plain transformers cannot run the layers of the others from disk, whoever runs their experts.
@pytest.mark.parametrize("name", ["llama4", "dbrx", "old_mixtral", "old_qwen2_moe", "old_deepseek"])
@torch.no_grad()
def test_loaded_with_layers_on_disk_gives_the_same_logits(name, tmp_path, zeros):
    plain = build(name)
    plain.save_pretrained(tmp_path / "model")
    base = "transformer" if name == "dbrx" else "model"
    parts = [f"{base}.{part}" for part, _ in getattr(plain, base).named_children()]
    device_map = {part: "disk" if part.endswith(("layers", "blocks")) else "cpu" for part in [*parts, "lm_head"]}
    keywords = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    model = auto_class(name, moetor).from_pretrained(tmp_path / "model", **keywords)
    assert all(parameter.is_meta for parameter in experts_in(model)[0].parameters())
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5
    model.set_experts_implementation(zeros)
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) > 1e-2


def test_forward_put_around_a_hook_would_be_seen(tmp_path):
    """What the tests above are there for: the hook must stay outside."""
    plain = build("longcat_flash")
    model = moetor.attach(copy.deepcopy(plain))
    offload_experts(model, to_cpu, tmp_path)
    for module in experts_in(model):
        module.forward = Forward(module)
    with pytest.raises(InvalidInput, match="on one device"):
        logits(model, tokens())


def test_weights_that_hooks_hold_back_would_be_missed(tmp_path, monkeypatch):
    model = moetor.attach(build("dbrx"))
    offload_experts(model, to_cpu, tmp_path)
    monkeypatch.setattr("moetor.integrations.transformers.adapters.seam._in_place", _nothing)
    with pytest.raises(InvalidInput, match="on one device"):
        logits(model, tokens())


class _nothing:
    def __init__(self, hooked: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def test_forward_of_somebody_else_is_not_bypassed():
    model = build("longcat_flash")
    experts = experts_in(model)[0]
    experts.forward = lambda *arguments: arguments[0]
    with pytest.raises(InvalidInput, match="has been given another forward"):
        moetor.attach(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    logits(model, tokens()).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_model
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_are_the_same_with_gradient_checkpointing(name, use_reentrant):
    plain, model = pair(name)
    for module in (*plain.modules(), *model.modules()):
        for name_of_chance in ("p", "dropout", "jitter_noise"):
            if isinstance(getattr(module, name_of_chance, None), float):
                setattr(module, name_of_chance, 0.0)
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"transformers has no gradient checkpointing for {name}")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    assert max(gradient_errors(gradients(model.train()), gradients(plain.train())).values()) <= 1e-5


@every_model
@torch.no_grad()
def test_model_that_is_deleted_is_gone_at_once(name):
    model = moetor.attach(build(name))
    logits(model, tokens())
    gone = weakref.ref(experts_in(model)[0])
    gc.collect()
    gc.disable()  # what only a collection would find is a cycle that holds the weights
    del model
    try:
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


@every_model
@torch.no_grad()
def test_experts_compile_to_one_graph_and_a_switch_is_followed(name, compiler, zeros):
    if name == "jetmoe":
        pytest.skip("its own router counts tokens on the host")
    if name in LISTED:
        pytest.skip("lists of modules run outside of torch.compile")
    model = moetor.attach(build(name), "grouped_mm")
    experts = experts_in(model)[0]
    adapter = adapter_of(experts)
    weights = experts_of(experts)
    sizes = Sizes(weights.num_experts, weights.hidden_size, 16)
    arguments = adapter.example(experts, sizes)
    compiled = compiler(experts, fullgraph=True, backend="eager")
    for backend in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(backend)
        torch.testing.assert_close(compiled(*arguments), experts(*arguments))
    before = experts(*arguments)
    model.set_experts_implementation(zeros)
    after = compiled(*arguments)
    assert not torch.equal(*(out[0] if isinstance(out, tuple) else out for out in (before, after)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "dbrx", "longcat_flash", "step3p7"])
@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm"])
@torch.no_grad()
def test_model_compiles_to_one_graph(name, backend, compiler):
    plain, model = pair(name, backend)
    compiled = compiler(model, fullgraph=True, backend="eager")
    found = compiled(input_ids=tokens(), use_cache=False).logits
    assert relative_error(found, logits(plain, tokens())) <= 1e-5


@pytest.mark.parametrize("name", ["jetmoe", *LISTED])
@torch.no_grad()
def test_blocks_that_break_graphs_run_with_the_breaks(name, compiler):
    plain, model = pair(name)
    if name in LISTED:
        moetor.stack_experts(model)
        model.set_experts_implementation("grouped_mm")
    experts, own = experts_in(model)[0], experts_in(plain)[0]
    weights = experts_of(experts)
    arguments = adapter_of(experts).example(experts, Sizes(weights.num_experts, weights.hidden_size, 16))
    torch.testing.assert_close(compiler(experts, backend="eager")(*arguments), own(*arguments))
    if name in LISTED:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="moetor runs experts that are modules of their own"):
            compiler(experts, fullgraph=True, backend="eager")(*arguments)
