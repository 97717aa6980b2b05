"""Any MoE model quantised while it is loaded: its experts, with the sizes and the gate of its own modules."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import moetor
from moetor import FineGrainedFP8Config, InvalidInput, Weight
from moetor.integrations.transformers import experts_of
from moetor.integrations.transformers.adapters import is_decorated
from moetor.quantization import dequantize_experts, quantize_experts
from moetor.testing import Case, Inputs, oracle, relative_error

from .models import CONFIGS, E, H, I, K, auto_class, build, dense, logits, tokens

# layouts that differ: one tensor an expert, transposed, interleaved with biases, without a gate, a gate of its own
NAMES = ["qwen3_moe", "deepseek_v3", "aria", "gpt_oss", "nemotron_h"]
CONFIGS_TO_TRY = {
    "fp8": FineGrainedFP8Config(),
    "fp8_16x16_e8m0": FineGrainedFP8Config(weight_block_size=(16, 16), scale_fmt="ue8m0"),
    "fp8_tensor_weights": FineGrainedFP8Config(weight_block_size=None, activation_scheme=None),
}


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    if not any(is_decorated(module) for module in build(name).modules()):
        pytest.skip(f"this release of transformers does not run {name} through its experts interface")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(name)
    build(name).save_pretrained(path)
    return path


def load(name, folder, **keywords):
    return auto_class(name, moetor).from_pretrained(folder, **keywords).eval()


def experts_in(model) -> dict:
    return {name: module for name, module in model.named_modules() if is_decorated(module)}


def halves_apart(weights):
    """As a pair where gate rows come first, since checkpoints quantise them apart."""
    if not weights.gated or weights.interleaved:
        return weights
    stack = weights.up.stack_ENK()
    gate, up = (Weight(half) for half in stack.chunk(2, dim=1))
    return moetor.ExpertWeights(
        (gate, up), Weight(weights.down.stack_ENK()), weights.activation, after_down=weights.after_down
    )


@pytest.mark.parametrize("format", CONFIGS_TO_TRY)
def test_experts_are_what_quantize_experts_makes_of_them(name, folder, format: str) -> None:
    plain, model = load(name, folder), load(name, folder, quantization_config=CONFIGS_TO_TRY[format])
    ours, theirs = experts_in(model), experts_in(plain)
    assert ours.keys() == theirs.keys()
    for key, module in ours.items():
        got, dense_weights = experts_of(module), experts_of(theirs[key])
        assert got.format == format
        assert (got.gated, got.interleaved, got.activation) == (
            dense_weights.gated,
            dense_weights.interleaved,
            dense_weights.activation,
        )
        assert got.down.bias_tensors() == [] or torch.equal(got.down.bias, dense_weights.down.bias)
        expected = dequantize_experts(quantize_experts(halves_apart(dense_weights), format), torch.float32)
        back = dequantize_experts(got, torch.float32)
        assert torch.equal(
            torch.cat([up.stack_ENK() for up in back.ups], dim=1),
            torch.cat([up.stack_ENK() for up in expected.ups], dim=1),
        )
        assert torch.equal(back.down.stack_ENK(), expected.down.stack_ENK())
    rest, plain_rest = dict(model.named_parameters()), dict(plain.named_parameters())
    assert all(torch.equal(rest[key], plain_rest[key]) for key in rest if ".experts." not in key)


def test_layer_does_what_the_oracle_says(name, folder) -> None:
    model = load(name, folder, quantization_config=FineGrainedFP8Config())
    module = next(iter(experts_in(model).values()))
    weights = experts_of(module)
    x, ids = torch.randn(19, weights.hidden_size), torch.rand(19, weights.num_experts).topk(K).indices
    routing = torch.rand(19, K)
    expected, _ = oracle(Inputs(Case(), weights, x, ids, routing), torch.zeros_like(x))
    for backend in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(backend)
        with torch.no_grad():
            assert relative_error(module(x, ids, routing), expected) <= 1e-2


def test_saved_it_is_a_quantised_checkpoint(name, folder, tmp_path) -> None:
    model = load(name, folder, quantization_config=FineGrainedFP8Config())
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "fp8"
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert {key for key in after if not key.endswith("_scale_inv")} == before.keys()
    again = load(name, tmp_path)
    for one, other in zip(experts_in(again).values(), experts_in(model).values(), strict=True):
        for got, expected in zip(experts_of(one).tensors(), experts_of(other).tensors(), strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    with torch.no_grad():
        assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_linears_are_left_and_the_saved_config_says_so(tmp_path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "dense")
    model = load("qwen3_moe", tmp_path / "dense", quantization_config=FineGrainedFP8Config())
    model.save_pretrained(tmp_path / "fp8")
    entry = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_proj" in entry["modules_to_not_convert"]
    assert "lm_head" in entry["modules_to_not_convert"]
    assert not any("experts" in module for module in entry["modules_to_not_convert"])


@pytest.mark.parametrize("skip", [["model.layers.1.mlp.experts"], ["model.layers.1"], [r"model\.layers\.1.*"]])
@pytest.mark.parametrize("alias", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_are_not_to_be_converted_are_not(tmp_path, skip, alias) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "dense")
    model = load("qwen3_moe", tmp_path / "dense", quantization_config=FineGrainedFP8Config(**{alias: skip}))
    formats = {key: experts_of(module).format for key, module in experts_in(model).items()}
    assert formats == {"model.layers.0.mlp.experts": "fp8", "model.layers.1.mlp.experts": "dense"}
    model.save_pretrained(tmp_path / "fp8")
    again = load("qwen3_moe", tmp_path / "fp8")
    assert {key: experts_of(module).format for key, module in experts_in(again).items()} == formats
    with torch.no_grad():
        assert torch.equal(logits(again, tokens()), logits(model, tokens()))


@pytest.mark.parametrize(
    "config",
    [transformers.FineGrainedFP8Config(), {"quant_method": "fp8", "weight_block_size": [128, 128]}],
    ids=["transformers", "dict"],
)
def test_transformers_config_and_a_dict_say_the_same(tmp_path, config) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    model = load("qwen3_moe", tmp_path, quantization_config=config)
    assert {experts_of(module).format for module in experts_in(model).values()} == {"fp8"}


def test_fp4_on_the_fly_where_sizes_allow_it(tmp_path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=4, **sizes)
    build("mixtral", config).save_pretrained(tmp_path)
    fp4 = FineGrainedFP8Config(expert_dtype="fp4", scale_fmt="ue8m0", activation_scheme=None)
    model = load("mixtral", tmp_path, quantization_config=fp4)
    (module,) = experts_in(model).values()
    assert experts_of(module).format == "mxfp4"
    assert module.gate_up_proj.shape == (4, 64, 32)
    model.save_pretrained(tmp_path / "fp4")
    with torch.no_grad():
        assert torch.equal(logits(load("mixtral", tmp_path / "fp4"), tokens()), logits(model, tokens()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            FineGrainedFP8Config(expert_dtype="fp4", scale_fmt="ue8m0"),
            rf"layers.0.mlp.experts.down_proj in mxfp4_dynamic needs an inner size divisible by 32, got {I}; use fp8",
        ),
        (FineGrainedFP8Config(activation_scheme="static"), "has no calibration for activation_scheme='static'"),
        (FineGrainedFP8Config(dequantize=True), "dequantize=True needs a checkpoint that is quantised"),
    ],
)
def test_what_cannot_be_had_is_refused_before_weights_are_read(tmp_path, config, message) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=message):
        load("qwen3_moe", tmp_path, quantization_config=config)


def test_a_dense_model_has_nothing_to_quantise(tmp_path) -> None:
    transformers.AutoModelForCausalLM.from_config(dense()).save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="LlamaConfig has no experts that moetor quantises"):
        moetor.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FineGrainedFP8Config())


def test_the_gate_is_read_from_the_module_as_ever() -> None:
    assert {"gpt_oss", "nemotron_h", "aria"} <= CONFIGS.keys()
    assert (E, H, I) == (8, 32, 24)  # nothing here divides by 128, and I not by 16
