"""Quantised checkpoints, loaded with no argument: their experts stay as they are stored, and are run so."""

import copy
import io
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import moetor
from moetor import ExpertsInterface
from moetor.core.formats import mxfp4
from moetor.integrations.transformers import experts_of
from moetor.integrations.transformers.adapters import is_experts
from moetor.quantization import FineGrainedFP8Config, dequantize_experts
from moetor.testing import Case, Inputs, oracle, relative_error

from . import quantized_checkpoints as checkpoints
from .compare import relative_error as relative_error_of_logits
from .models import E, K, logits, tokens
from .quantized_checkpoints import HIDDEN, Written

# name: architecture, quantization_config, the format that experts are to be found in
CASES = {
    "v3": (checkpoints.deepseek_v3, {}, "fp8"),
    "v3_ue8m0": (checkpoints.deepseek_v3, {"scale_fmt": "ue8m0"}, "fp8_e8m0"),
    "v4": (checkpoints.deepseek_v4, {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, "mxfp4_dynamic"),
    "weights_only": (checkpoints.deepseek_v3, {"activation_scheme": None}, "fp8_weights"),
    "per_tensor": (checkpoints.mixtral, {"weight_block_size": None}, "fp8_tensor"),
    "static": (checkpoints.mixtral, {"weight_block_size": None, "activation_scheme": "static"}, "fp8_tensor_static"),
    "gpt_oss": (checkpoints.gpt_oss, None, "mxfp4"),
}

CPU = torch.device("cpu")
RUNNING = [name for name in ExpertsInterface.names() if ExpertsInterface[name].machine_why_not(CPU) is None]


@pytest.fixture(scope="module", params=CASES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def written(name, tmp_path_factory) -> Written:
    torch.manual_seed(0)
    config, fields, _ = CASES[name]
    folder = tmp_path_factory.mktemp(name)
    if fields is None:
        return checkpoints.write_blocks(folder, config(), mxfp4())
    scale = "scale" if name == "v4" else "weight_scale_inv"
    return checkpoints.write(folder, config(), FineGrainedFP8Config(**fields), scale)


def load(folder, **keywords):
    """In float32, so that what differs is quantisation."""
    return moetor.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **keywords).eval()


@pytest.fixture(scope="module")
def model(written):
    return load(written.folder)


@pytest.fixture(scope="module")
def twin(written):
    return load(written.twin)


def experts_in(model) -> list[nn.Module]:
    return [module for module in model.modules() if is_experts(module)]


def dense_stacks(module) -> list[Tensor]:
    """Gate and up in one (E, 2I, H), then down, as numbers."""
    weights = dequantize_experts(experts_of(module), torch.float32)
    return [torch.cat([up.stack_ENK() for up in weights.ups], dim=1), weights.down.stack_ENK()]


def test_experts_keep_format_and_numbers_of_the_checkpoint(name, model, twin) -> None:
    pairs = list(zip(experts_in(model), experts_in(twin), strict=True))
    assert pairs
    for module, dense in pairs:
        assert experts_of(module).format == CASES[name][2]
        for got, expected in zip(dense_stacks(module), dense_stacks(dense), strict=True):
            assert torch.equal(got, expected)


def test_everything_else_is_the_dequantised_twins(model, twin, written) -> None:
    ours, expected = dict(model.named_parameters()), dict(twin.named_parameters())
    assert all(torch.equal(ours[key], expected[key]) for key in ours.keys() & expected.keys() if ".experts." not in key)
    others = [key for key in load_file(written.folder / "model.safetensors") if key.endswith("_scale_inv")]
    dequantized = sum(".experts." not in key for key in others)
    if dequantized:
        (note,) = model.explain_experts().notes
        assert note == f"{dequantized} quantised matrices that are no experts were dequantised to float32"


def test_static_scales_of_activations_are_each_matrixs_own(name, model, written) -> None:
    if name != "static":
        pytest.skip("other formats have none")
    tensors = load_file(written.folder / "model.safetensors")
    for layer, module in enumerate(experts_in(model)):
        experts = experts_of(module)
        for weight, part in zip(experts.all, ("w1", "w3", "w2"), strict=True):
            key = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.{part}.activation_scale"
            assert weight.activation_scale.tolist() == [tensors[key.format(expert)].item() for expert in range(E)]


def test_payload_is_frozen_and_not_16_bit(model) -> None:
    for module in experts_in(model):
        for weight in experts_of(module).all:
            assert all(not tensor.requires_grad for tensor in weight.frozen_tensors())
            assert weight.first.element_size() == 1


def a_call(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(19, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(19, E, generator=generator).topk(K).indices
    return x, ids, torch.rand(19, K, generator=generator)


@pytest.fixture(scope="module")
def in_bfloat16(written) -> tuple:
    """The model as its config says, and its twin."""
    return tuple(
        moetor.AutoModelForCausalLM.from_pretrained(one, dtype="auto") for one in (written.folder, written.twin)
    )


@pytest.mark.parametrize("backend", RUNNING)
def test_in_bfloat16_each_layer_does_what_its_dequantised_twin_does(name, in_bfloat16, backend: str) -> None:
    model, twin = in_bfloat16
    model.set_experts_implementation(backend)
    x, ids, routing = a_call(torch.bfloat16)
    # rounding of bfloat16 on both sides; where activations are rounded to e4m3, of that, in two products
    # (a clamp that cuts most of the first product off leaves what is small beside its rounding)
    limit = 1e-2 if CASES[name][2] in ("fp8_weights", "mxfp4") else 0.13 if name == "v4" else 7e-2
    for module, dense in zip(experts_in(model), experts_in(twin), strict=True):
        with torch.no_grad():
            result, expected = module(x, ids, routing), dense.bfloat16()(x, ids, routing)
        assert result.dtype == torch.bfloat16
        assert relative_error(result, expected) <= limit
    model.set_experts_implementation("auto")


@pytest.mark.parametrize("backend", RUNNING)
def test_each_layer_does_what_the_oracle_says(model, backend: str) -> None:
    model.set_experts_implementation(backend)
    x, ids, routing = a_call(torch.float32)
    for module in experts_in(model):
        with torch.no_grad():
            result = module(x, ids, routing)
        expected, _ = oracle(Inputs(Case(), experts_of(module), x, ids, routing), torch.zeros_like(x))
        assert relative_error(result, expected) <= 1e-2
    model.set_experts_implementation("auto")


def test_model_says_what_its_dequantised_twin_says(name, model, twin) -> None:
    ids = tokens()
    with torch.no_grad():
        error = relative_error_of_logits(logits(model, ids), logits(twin, ids))
    if CASES[name][2] in ("fp8_weights", "mxfp4"):
        assert error <= 1e-5  # the same numbers, multiplied in another order
    else:
        # Activations are rounded, 6e-2 a layer, and behind it a token may choose other experts. That each
        # layer does what it should, to 1e-2, is tested above.
        assert 1e-3 < error <= 0.3


def test_gradients_pass_through_frozen_experts(model) -> None:
    embedding = model.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(logits(model, tokens()).square().mean(), embedding)
    assert gradient.isfinite().all()
    assert gradient.any()


def test_saved_and_loaded_again_it_is_the_same_bit_for_bit(name, written, model, tmp_path) -> None:
    model.save_pretrained(tmp_path)
    before, after = load_file(written.folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    if name == "v4" and not hasattr(transformers.core_model_loading, "apply_renamings"):
        # older releases of transformers cannot name them so
        before = {re.sub(r"(experts.*)\.scale$", r"\1.weight_scale_inv", key): t for key, t in before.items()}
    experts = {key for key in before if ".experts." in key}
    assert experts == {key for key in after if ".experts." in key}
    for key in experts:
        assert before[key].dtype == after[key].dtype or ".bias" in key or "_bias" in key
        if before[key].dtype.itemsize == 1:
            assert torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8))
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == ("mxfp4" if name == "gpt_oss" else "fp8")
    again = load(tmp_path)
    assert [experts_of(m).format for m in experts_in(again)] == [experts_of(m).format for m in experts_in(model)]
    with torch.no_grad():
        assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_copies_and_pickles_are_the_same(model) -> None:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    with torch.no_grad():
        expected = logits(model, tokens())
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(logits(other, tokens()), expected)
            assert experts_of(experts_in(other)[0]).format == experts_of(experts_in(model)[0]).format


@pytest.mark.parametrize("library", [moetor, transformers])
def test_dequantize_gives_the_twin_back(written, twin, library, tmp_path) -> None:
    model = load(written.folder, quantization_config=library.FineGrainedFP8Config(dequantize=True))
    assert all(experts_of(module).format == "dense" for module in experts_in(model))
    ours, expected = dict(model.named_parameters()), dict(twin.named_parameters())
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in ours)
    assert getattr(model.config, "quantization_config", None) is None
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(written.twin / "model.safetensors").keys()
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_dequantized_experts_read_bf16(written) -> None:
    config = moetor.FineGrainedFP8Config(dequantize=True)
    model = moetor.AutoModelForCausalLM.from_pretrained(written.folder, quantization_config=config)
    assert {experts_of(module).dtype for module in experts_in(model)} == {torch.bfloat16}
    assert "bfloat16 on cpu" in str(model.explain_experts())


def test_explain_names_the_format(name, model) -> None:
    explained = model.explain_experts()
    assert f"{CASES[name][2]} on cpu" in str(explained)
    assert explained.as_dict()["notes"] == list(explained.notes)
    assert explained.parts[0].by_tokens[1].chosen == "grouped_mm"


def test_the_callers_config_is_left_as_it_is(written) -> None:
    config = transformers.AutoConfig.from_pretrained(written.folder)
    before = copy.deepcopy(config.to_dict())
    load(written.folder, config=config)
    assert config.to_dict() == before


def test_fields_of_the_config_can_be_given_as_keywords(written) -> None:
    assert load(written.folder, use_cache=False).config.use_cache is False
