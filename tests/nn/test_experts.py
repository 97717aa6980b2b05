"""moetor.nn.Experts: the same results and gradients as the float64 loop, as an ordinary module in every other way."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import moetor
from moetor import Activation, BackendRefused, ExpertsInterface, InvalidInput
from moetor.core.interface import describe_call
from moetor.nn import Experts
from moetor.testing import Case, Inputs, oracle, prime_memory, relative_error

E, H, I, K = 5, 32, 24, 2
GPT_OSS = Activation("silu", alpha=1.702, limit=0.5, up_offset=1.0)
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "no gate": {"gated": False, "activation": "relu2"},
    "no gate, bias, transposed": {"gated": False, "activation": "gelu", "bias": True, "transposed": True},
    "transposed": {"transposed": True},
    "as gpt-oss": {"interleaved": True, "transposed": True, "bias": True, "activation": GPT_OSS},
    "own function": {"activation": Activation.custom(lambda product: product[..., :I].sin() * product[..., I:])},
}
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def make_layer(backend: str = "auto", dtype: torch.dtype = torch.float32, **options: object) -> Experts:
    return Experts(E, H, I, backend=backend, dtype=dtype, **options)


def make_call(*leading: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states (…, H), top_k_index and top_k_weights (…, K) with some ids of no expert."""
    index = torch.rand(*leading, E).topk(K).indices
    index[..., 0] = torch.where(torch.rand(leading) < 0.2, -1, index[..., 0])
    x = torch.randn(*leading, H, dtype=dtype, requires_grad=True)
    return x, index, torch.rand(*leading, K, requires_grad=True)


def expect(layer: Experts, call: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The float64 loop's result and gradients, those of the weights by the parameters' names."""
    flat = [tensor.detach().flatten(0, -2) for tensor in call]
    for tensor, like in zip(flat, call, strict=True):
        tensor.requires_grad_(like.requires_grad)
    weights = layer.weights()
    result, gradients = oracle(Inputs(Case(dtype=call[0].dtype), weights, *flat), upstream.flatten(0, -2))
    owners = {id(parameter): name for name, parameter in layer.named_parameters()}
    names = {f"weight{i}": owners[id(tensor)] for i, tensor in enumerate(weights.tensors())}
    return result.view(call[0].shape), {names.get(name, name): grad for name, grad in gradients.items()}


def refusal(layer: Experts, call: tuple[Tensor, ...], backend: str) -> str | None:
    weights = layer.weights()
    flat = [tensor.flatten(0, -2) for tensor in call]
    return ExpertsInterface[backend].refusal(weights, describe_call(weights, *flat))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", ExpertsInterface.names())
def test_result_and_every_gradient_are_those_of_a_float64_loop(backend, options, dtype):
    layer = make_layer(backend, dtype, **options)
    call = make_call(3, 7, dtype=dtype)
    if reason := refusal(layer, call, backend):
        pytest.skip(reason)
    upstream = torch.randn_like(call[0])
    expected, gradients = expect(layer, call, upstream)
    prime_memory("cpu")
    result = layer(*call)
    result.backward(upstream)
    assert result.dtype == dtype
    assert relative_error(result.detach(), expected) <= LIMITS[dtype]
    total = sum(gradient.norm() ** 2 for gradient in gradients.values()).sqrt().item()
    found = {"hidden_states": call[0].grad, "top_k_weights": call[2].grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        error = relative_error(gradient.view(gradients[name].shape), gradients[name], floor=1e-3 * total)
        assert error <= 2 * LIMITS[dtype], name


def test_storage_orders_of_the_same_numbers_give_the_same_result():
    """The loop above reads the layer's own account of its parameters; this does not."""
    plain, call = make_layer(bias=True), make_call(9)
    state = plain.state_dict()
    swapped = {name: tensor.mT if tensor.dim() == 3 else tensor for name, tensor in state.items()}
    woven = {
        name: torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2) if "gate_up" in name else tensor
        for name, tensor in state.items()
    }
    for option, stored in (("transposed", swapped), ("interleaved", woven)):
        layer = make_layer(bias=True, **{option: True})
        layer.load_state_dict(stored)
        assert relative_error(layer(*call).detach(), plain(*call).detach()) <= LIMITS[torch.float32], option


@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (2, 0), (2, 1, 3)], ids=str)
def test_any_leading_sizes_give_the_flat_result(leading):
    layer, call = make_layer(), make_call(*leading)
    flat = layer(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in call))
    result = layer(*call)
    assert result.shape == (*leading, H)
    assert torch.equal(result.reshape(-1, H), flat)


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", "eager"])
def test_no_tokens_keep_every_parameter_in_the_graph(backend):
    layer, call = make_layer(backend, bias=True), make_call(2, 0)
    layer(*call).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())
    assert call[0].grad.shape == (2, 0, H)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, H), (6, K), (6, K)), "leading sizes of hidden_states"),
        (((6, H), (6, K), (3, 2, K)), "leading sizes of hidden_states"),
        (((6, H + 1), (6, K), (6, K)), f"H = {H} columns"),
        (((6, H), (6, K), (6, K + 1)), "both have shape"),
        (((6, H), (6, 0), (6, 0)), "K = 0"),
        (((), (K,), (K,)), "leading sizes of hidden_states"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_told(shapes, message):
    x, index, weights = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(InvalidInput, match=message):
        make_layer()(x, index.long(), weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gated": False, "interleaved": True}, "cannot interleave"),
        ({"gated": False, "activation": GPT_OSS}, "nor offset"),
        ({"activation": "swish"}, "silu, gelu"),
        ({"backend": "gruped_mm"}, "did you mean 'grouped_mm'"),
        ({"activation": torch.relu}, "moetor.Activation"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_told_when_the_layer_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        Experts(E, H, I, **options)


def test_sizes_must_be_positive():
    with pytest.raises(InvalidInput, match="I = 0"):
        Experts(E, H, 0)


@pytest.fixture
def seen():
    """Names of the stranger's backends that ran, in order."""
    ran = []

    def stranger(name):
        def forward(weights, hidden_states, top_k_index, top_k_weights):
            ran.append(name)
            return torch.zeros_like(hidden_states)

        return forward

    for name in ("first", "second"):
        ExpertsInterface.register(name, stranger(name))
    yield ran
    for name in ("first", "second"):
        ExpertsInterface.unregister(name)


def test_backend_of_the_call_goes_before_that_of_the_layer(seen):
    layer, call = make_layer("first"), make_call(4)
    layer(*call)
    layer(*call, backend="second")
    layer.backend = "second"
    layer(*call)
    layer(*call, backend="first")
    assert seen == ["first", "second", "second", "first"]
    assert layer.explain(*call).chosen == "second"
    assert "backend='second'" in repr(layer)
    with pytest.raises(moetor.UnknownBackend):
        layer.backend = "third"
    assert layer.backend == "second"


def test_a_backend_that_cannot_run_the_call_is_an_error():
    ExpertsInterface.register("picky", moetor.Backend("picky", lambda *_: None, why_not=lambda *_: "it is monday"))
    try:
        with pytest.raises(BackendRefused, match="it is monday"):
            make_layer("picky")(*make_call(4))
    finally:
        ExpertsInterface.unregister("picky")


def test_explain_says_why_not():
    explanation = make_layer().explain(*make_call(2, 3))
    assert explanation.chosen in ExpertsInterface.names()
    assert set(explanation.reasons) == set(ExpertsInterface.names()) - {"auto"}


def through_bytes(layer: Experts) -> Experts:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "make_copy",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), through_bytes],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copy_is_equal_and_independent(make_copy):
    layer, call = make_layer("eager", interleaved=True, bias=True, activation=GPT_OSS), make_call(9)
    other = make_copy(layer)
    assert repr(other) == repr(layer)
    assert torch.equal(other(*call), layer(*call))
    other.backend = "batched_mm"
    nn.init.zeros_(other.down_proj)
    assert layer.backend == "eager"
    assert not torch.equal(other(*call), layer(*call))


def test_state_dict_has_the_names_of_the_field_and_goes_round():
    names = ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]
    layer, other, call = make_layer(bias=True), make_layer(bias=True), make_call(9)
    assert list(layer.state_dict()) == names
    assert list(make_layer(gated=False).state_dict()) == ["up_proj", "down_proj"]
    assert not torch.equal(other(*call), layer(*call))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(*call), layer(*call))
    other.load_state_dict({name: 2 * tensor for name, tensor in layer.state_dict().items()}, assign=True)
    assert not torch.equal(other(*call), layer(*call))


def test_layer_made_on_meta_is_drawn_as_the_one_made_in_place():
    call = make_call(9)
    torch.manual_seed(1)
    expected = make_layer(bias=True)
    layer = make_layer(bias=True, device="meta")
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    assert layer(*(tensor.to("meta") for tensor in call)).shape == (9, H)
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    assert torch.equal(layer(*call), expected(*call))


@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_is_drawn_as_a_linear_layer_is(transposed):
    """Not from the sizes of the whole stack, whose fan-in torch.nn.init would take for H times E or I."""
    layer = Experts(3, 512, 64, bias=True, transposed=transposed)
    sizes = {"gate_up_proj": 512, "gate_up_proj_bias": 512, "down_proj": 64, "down_proj_bias": 64}
    for name, parameter in layer.named_parameters():
        assert sizes[name] ** -0.5 * 0.9 < parameter.abs().max().item() <= sizes[name] ** -0.5


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", "eager"])
def test_autocast_computes_in_its_dtype_and_gradients_have_the_parameters(backend):
    layer, call = make_layer(backend), make_call(9)
    expected = layer(*call)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(*call)
    result.sum().backward()
    assert result.dtype == torch.float32
    assert 1e-4 < relative_error(result.detach(), expected.detach()) <= 1e-2
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_without_autocast_a_foreign_dtype_is_an_error():
    x, index, weights = make_call(4, dtype=torch.bfloat16)
    with pytest.raises(InvalidInput, match="dtype of the weights"):
        make_layer()(x, index, weights)


@pytest.mark.parametrize("backend", ["auto", "grouped_mm", "batched_mm"])
def test_compiles_to_one_graph_and_a_switch_is_followed(backend, seen):
    layer, call = make_layer(backend, bias=True), make_call(2, 5)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    result = compiled(*call)
    expected, gradients = expect(layer, call, torch.ones_like(result))
    assert relative_error(result.detach(), expected) <= LIMITS[torch.float32]
    result.sum().backward()
    assert relative_error(layer.down_proj.grad, gradients["down_proj"]) <= 2 * LIMITS[torch.float32]
    layer.backend = "first"
    assert not compiled(*call).any()
    torch._dynamo.reset()


# torch 2.11 says so of its own buffers
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@torch.no_grad()
@pytest.mark.parametrize("backend", ["auto", "grouped_mm", "batched_mm"])
def test_exported_program_takes_any_number_of_tokens(backend):
    layer, call = make_layer(backend), make_call(2, 5)
    # batched_mm has a bound on what it gathers at once, so the program's sizes need one as well
    tokens = torch.export.Dim("tokens", max=1024 if backend == "batched_mm" else None)
    shapes = ({1: tokens},) * 3
    program = torch.export.export(layer, call, dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for num_tokens in (5, 1, 19):
        call = make_call(2, num_tokens)
        assert relative_error(loaded(*call), layer(*call)) <= LIMITS[torch.float32]


def test_frozen_layer_gets_no_gradients():
    layer, call = make_layer(bias=True).requires_grad_(False), make_call(9)
    layer(*call).sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert call[0].grad is not None
