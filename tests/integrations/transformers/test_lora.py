"""LoRA on expert parameters: every factor gets its gradient, the frozen weights none, and W + B·A is not kept."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import moetor
from moetor import BackendRefused
from moetor.core.interface import describe_call
from moetor.integrations.transformers import experts_of

from .backends import ON_CPU
from .compare import gradient_errors, relative_error
from .models import E, H, I, K, build, logits, tokens

peft = pytest.importorskip("peft")
# PEFT asks the model for it, and transformers 5.24 has another name for it
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# gate rows first; and interleaved, transposed, with biases and a gate of its own
MODELS = ["qwen3_moe", "gpt_oss"]


def wrap(model: nn.Module, seed: int = 3) -> nn.Module:
    """The model in PEFT's, with factors that are not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=PARAMETERS)
    config.init_lora_weights = False
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config)


def attached_before(model: nn.Module, backend: str) -> nn.Module:
    return wrap(moetor.attach(model, backend))


def attached_after(model: nn.Module, backend: str) -> nn.Module:
    model = wrap(model)
    moetor.attach(model.get_base_model(), backend)
    return model


ORDERS = [attached_before, attached_after]


def pair(backend: str, order: Callable[..., nn.Module] = attached_before, name: str = "qwen3_moe"):
    """PEFT around transformers' own model in float64, and around an attached one of the same numbers."""
    plain = build(name)
    return wrap(copy.deepcopy(plain)).double(), order(plain, backend)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trains(backend: str) -> bool:
    """Whether the backend runs a layer like those here with gradients."""
    layer = moetor.nn.Experts(E, H, I)
    call = describe_call(layer.weights(), torch.zeros(3, H), torch.zeros(3, K, dtype=torch.long), torch.zeros(3, K))
    return moetor.ExpertsInterface[backend].refusal(layer.weights(), call) is None


def factors(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_every_factor_of_peft_gets_the_gradient_of_float64_and_the_rest_none(backend, order, name):
    exact, model = pair(backend, order, name)
    if not trains(backend):
        with pytest.raises(BackendRefused, match="backward"):
            gradients(model)
        return
    expected, found = gradients(exact), gradients(model)
    assert len(factors(model)) == 2 * 2 * 2  # A and B of two parameters in two layers
    assert {name for name, grad in found.items() if grad is not None} == factors(model)
    assert max(gradient_errors(found, expected).values()) <= 1e-5
    assert relative_error(logits(model, tokens()), logits(exact, tokens())) <= 1e-5


@pytest.mark.parametrize("order", ORDERS)
def test_wrapped_experts_are_found_and_follow_a_switch(order, zeros):
    _, model = pair("grouped_mm", order)
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    before = logits(model, tokens())
    model.set_experts_implementation(zeros)
    silenced = logits(model, tokens())
    assert relative_error(silenced, before) > 1e-2
    with model.disable_adapter():
        assert torch.equal(logits(model, tokens()), silenced)
    assert model.explain_experts().parts[0].layers == 2


@pytest.mark.parametrize("order", ORDERS)
def test_names_saved_files_and_merged_weights_are_those_of_the_plain_model(order, tmp_path):
    plain = build("qwen3_moe")
    theirs, ours = wrap(copy.deepcopy(plain)), order(copy.deepcopy(plain), "grouped_mm")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.save_pretrained(tmp_path / "plain")
    ours.save_pretrained(tmp_path / "attached")
    file = "adapter_model.safetensors"
    assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "attached" / file).read_bytes()
    loaded = peft.PeftModel.from_pretrained(moetor.attach(copy.deepcopy(plain), "grouped_mm"), tmp_path / "plain")
    expected = logits(theirs, tokens())
    for model in (ours, loaded, ours.merge_and_unload()):
        assert relative_error(logits(model, tokens()), expected) <= 1e-5
    assert relative_error(expected, logits(plain, tokens())) > 1e-2


@pytest.mark.parametrize("choice", ["auto", "grouped_mm", {"": "eager"}], ids=str)
def test_folder_of_an_adapter_is_loaded_as_its_model(choice, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = wrap(base)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = moetor.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", experts_implementation=choice)
    assert relative_error(logits(ours, tokens()), logits(theirs, tokens())) <= 1e-5
    assert ours.get_experts_implementation() == (choice if isinstance(choice, dict) else {"": choice})
    with pytest.raises(moetor.UnknownBackend, match="text_config"):
        moetor.AutoModelForCausalLM.from_pretrained(
            tmp_path / "adapter", experts_implementation={"text_config": "eager"}
        )


def test_adapter_added_by_transformers_itself_is_followed():
    model = moetor.attach(build("qwen3_moe"), "grouped_mm")
    before = logits(model, tokens())
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=PARAMETERS)
    config.init_lora_weights = False
    try:
        model.add_adapter(config)
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} wants another PEFT than {peft.__version__}: {error}")
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    assert relative_error(logits(model, tokens()), before) > 1e-2
    assert max(gradient_errors(gradients(model), gradients(exact)).values()) <= 1e-5


def test_each_of_two_adapters_is_used_when_it_is_chosen():
    exact, model = pair("grouped_mm")
    found = []
    for both in (exact, model):
        both.add_adapter("other", both.peft_config["default"])
    model.load_state_dict(exact.state_dict())
    for name in ("default", "other"):
        for both in (exact, model):
            both.set_adapter(name)
        found.append(logits(model, tokens()))
        assert relative_error(found[-1], logits(exact, tokens())) <= 1e-5
    assert relative_error(*found) > 1e-2


class StacksMade(TorchDispatchMode):
    """Watches the memory of every tensor of the size of an expert parameter that is made inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        stacks = [
            parameter for name, parameter in model.named_parameters() if "lora_" not in name and parameter.ndim == 3
        ]
        self.shapes = {tuple(stack.shape) for stack in stacks}
        self.own = {StorageWeakRef(stack.untyped_storage()) for stack in stacks}
        self.made: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tuple(tensor.shape) in self.shapes:
                self.made.add(StorageWeakRef(tensor.untyped_storage()))
        return result

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.made - self.own)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("name", MODELS)
def test_sum_of_weights_and_factors_is_not_kept_beyond_the_call(name, backend):
    _, model = pair(backend, name=name)
    with torch.no_grad(), StacksMade(model) as stacks:
        result = logits(model, tokens())
    assert len(stacks.made - stacks.own) >= 4  # two parameters in two layers
    assert not stacks.alive()
    assert result.isfinite().all()
    if trains(backend):
        with StacksMade(model) as stacks:
            loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
            assert 0 < stacks.alive() <= 4  # autograd's, for the gradient of the hidden states
            loss.backward()
        assert not stacks.alive()


@pytest.mark.parametrize("backend", ["grouped_mm", "eager"])
def test_gradient_checkpointing_frees_the_sum_of_each_layer_before_the_backward_pass(backend):
    exact, model = pair(backend)
    expected = gradients(exact)
    base = model.get_base_model()
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    with StacksMade(model) as stacks:
        loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        assert stacks.made - stacks.own
        assert not stacks.alive()
        loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(gradient_errors(found, expected).values()) <= 1e-5


class LoRA(nn.Module):
    """W (E, N, K) to W + B·A, as a parametrization."""

    def __init__(self, weight: Tensor, rank: int = 4) -> None:
        super().__init__()
        num_experts, rows, columns = weight.shape
        self.lora_A = nn.Parameter(torch.randn(num_experts, rank, columns, dtype=weight.dtype) * columns**-0.5)
        self.lora_B = nn.Parameter(torch.randn(num_experts, rows, rank, dtype=weight.dtype) * 0.3)

    def forward(self, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, self.lora_B, self.lora_A)


def parametrized(experts: nn.Module, names: tuple[str, ...] = ("gate_up_proj", "down_proj")) -> nn.Module:
    experts.requires_grad_(False)
    for name in names:
        parametrize.register_parametrization(experts, name, LoRA(getattr(experts, name)))
        experts.parametrizations[name].original.requires_grad_(False)
    return experts


def own_layer(backend: str, **options: bool) -> nn.Module:
    return parametrized(moetor.nn.Experts(E, H, I, backend=backend, **options))


def layer_of_transformers(backend: str) -> nn.Module:
    """Of a model that is attached; gpt-oss' weights are transposed and have biases."""
    model = moetor.attach(build("gpt_oss"), backend)
    return parametrized(model.model.layers[0].mlp.experts)


LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "moetor.nn": own_layer,
    "moetor.nn, transposed, bias": lambda backend: own_layer(backend, transposed=True, bias=True),
    "transformers": layer_of_transformers,
}


@pytest.fixture
def call() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(9, H, requires_grad=True), torch.rand(9, E).topk(K).indices, torch.rand(9, K)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_every_factor_of_a_parametrization_gets_the_gradient_of_float64(backend, make, call):
    layer = make(backend)
    exact = copy.deepcopy(layer).double()
    if not trains(backend):
        with pytest.raises(BackendRefused, match="backward"):
            layer(*call)
        return
    with StacksMade(layer) as stacks:
        result = layer(*call)
        assert stacks.alive() == 2
        result.square().sum().backward()
    assert not stacks.alive()
    x, index, weights = call
    wide = x.detach().double().requires_grad_()
    expected = reference(exact, wide, index, weights.double())
    expected.square().sum().backward()
    assert relative_error(result, expected) <= 1e-5
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert {name for name, grad in found.items() if grad is not None} == factors(layer)
    exact_gradients = {name: parameter.grad for name, parameter in exact.named_parameters()}
    errors = gradient_errors({**found, "x": x.grad}, {**exact_gradients, "x": wide.grad})
    assert max(errors.values()) <= 1e-5


def reference(layer: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A plain loop over tokens and slots, in the dtype of x."""
    if isinstance(layer, moetor.nn.Experts):
        data, activation, interleaved = layer.weights(), layer.activation, False
    else:
        data = experts_of(layer)
        activation, interleaved = data.activation, data.interleaved
    up, down = (weight.data.mT if weight.transposed else weight.data for weight in (data.up, data.down))
    rows = []
    for token, (ids, scales) in enumerate(zip(index.tolist(), weights, strict=True)):
        row = torch.zeros_like(x[0])
        for expert, scale in zip(ids, scales, strict=True):
            product = up[expert] @ x[token] + (0 if data.up.bias is None else data.up.bias[expert])
            halves = (product[::2], product[1::2]) if interleaved else product.chunk(2)
            inner = activation.apply(*halves)
            row = row + scale * (down[expert] @ inner + (0 if data.down.bias is None else data.down.bias[expert]))
        rows.append(row)
    return torch.stack(rows)


def test_a_gradient_for_the_factors_alone_is_seen_before_the_call(call):
    """A kernel without a backward pass refuses it: nothing else of this call needs a gradient."""
    call = tuple(tensor.detach() for tensor in call)
    assert describe_call(own_layer("auto").weights(), *call).needs_grad
    with torch.no_grad():
        assert not describe_call(own_layer("auto").weights(), *call).needs_grad


def test_parametrized_layer_is_copied_and_its_state_goes_round(call):
    layer = own_layer("grouped_mm")
    other, fresh = copy.deepcopy(layer), own_layer("grouped_mm")
    assert torch.equal(other(*call), layer(*call))
    assert not torch.equal(fresh(*call), layer(*call))
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(*call), layer(*call))
    expected = layer(*call)
    for name in ("gate_up_proj", "down_proj"):  # what they give becomes the parameter
        parametrize.remove_parametrizations(layer, name)
    assert list(layer.state_dict()) == ["gate_up_proj", "down_proj"]
    assert torch.equal(layer(*call), expected)
