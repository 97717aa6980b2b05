"""O12 for quantised checkpoints: what lacks its scale, or does not fit, is one error that names it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moetor
from moetor import CheckpointError, FineGrainedFP8Config, InvalidInput
from moetor.integrations.transformers import experts_of
from moetor.integrations.transformers.adapters import is_experts
from moetor.integrations.transformers.quantized_loading import _renamed_scales
from moetor.integrations.transformers.quantized_ops import Dequantize
from moetor.quantization import dequantize, quantize

from . import quantized_checkpoints as checkpoints
from .models import logits, tokens
from .quantized_checkpoints import Tensors, rewrite

EXPERT = "model.layers.1.mlp.experts.3.gate_proj"
LINEAR = "model.layers.0.self_attn.kv_a_proj_with_mqa"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    return checkpoints.write(folder, checkpoints.deepseek_v3(), FineGrainedFP8Config()).folder


def drop(*keys: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(key) for key in keys]


def drop_all(suffix: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(suffix)]


def put(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: change(tensors[key])})


def put_all(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: change(t) for key, t in tensors.items() if part in key})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop(f"{EXPERT}.weight"), f"lacks expert weights: {EXPERT}.weight"),
        (drop(f"{EXPERT}.weight_scale_inv"), f"lacks expert weights: {EXPERT}.weight_scale_inv"),
        (drop_all("gate_proj.weight_scale_inv"), r"lacks the scales of .*layers.1.mlp.experts.0.gate_proj.weight, "),
        (drop_all("experts.3.down_proj.weight_scale_inv"), "experts.3.down_proj.weight_scale_inv"),
        (drop(f"{LINEAR}.weight_scale_inv"), f"lacks the scales of {LINEAR}.weight"),
        (
            put(f"{LINEAR}.weight_scale_inv", lambda t: t[:, :2]),
            rf"{LINEAR}.weight of shape \(64, 288\) needs {LINEAR}.weight_scale_inv of shape \(1, 3\), .*got \(1, 2\)",
        ),
        (
            put_all("experts.", lambda t: t[:, :2] if t.dtype == torch.float32 and t.shape[-1] == 3 else t),
            r"layers.1.mlp.experts.gate_up_proj: .*need scales \(E, 2, 3\)|need scales \(E, 3, 3\)",
        ),
        (
            put(f"{EXPERT}.weight_scale_inv", lambda t: t[:1]),
            r"another shape than the other experts' \(2, 3\): model.layers.1.mlp.experts.3.gate_proj.weight_scale_inv",
        ),
        (
            put_all("down_proj.weight_scale_inv", lambda t: t.to(torch.float8_e8m0fnu).view(torch.uint8)),
            "needs scales of float32 or float8_e8m0fnu, got torch.uint8; bytes are exponents only where",
        ),
        (
            put_all("down_proj.weight_scale_inv", lambda t: t.to(torch.float8_e8m0fnu)),
            r"experts.the scales of gate_up_proj and down_proj need to be of one kind, got \['e8m0', 'float32'\]",
        ),
    ],
    ids=[
        "expert",
        "scale",
        "kind of scale",
        "scale of one",
        "linear",
        "linear's shape",
        "shape",
        "one shape",
        "uint8",
        "two kinds",
    ],
)
def test_what_is_wrong_is_named(whole, tmp_path, change, named) -> None:
    folder = rewrite(whole, tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=named) as caught:
        moetor.AutoModelForCausalLM.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_experts_that_are_not_quantised_though_the_config_says_so_are_refused(whole, tmp_path) -> None:
    """bfloat16 numbers taken for e4m3 would be rounded once more, in silence."""
    folder = rewrite(
        whole, tmp_path / "dense", put_all(".experts.", lambda t: t.bfloat16() if t.dtype.itemsize == 1 else t)
    )
    with pytest.raises(CheckpointError, match="need a payload of torch.float8_e4m3fn, got torch.bfloat16"):
        moetor.AutoModelForCausalLM.from_pretrained(folder)


def test_a_block_that_does_not_fit_is_named_with_the_shapes(whole, tmp_path) -> None:
    """Linears are met before experts."""
    folder = rewrite(whole, tmp_path / "block", lambda tensors: None, weight_block_size=[64, 64])
    with pytest.raises(
        CheckpointError,
        match=r"layers.0.mlp.down_proj.weight of shape \(288, \d+\) needs .*down_proj.weight_scale_inv of shape"
        r" \(5, \d\), one scale a block of \(64, 64\), got \(3, \d\)",
    ):
        moetor.AutoModelForCausalLM.from_pretrained(folder)


def test_a_block_that_does_not_fit_experts_is_named_too(tmp_path) -> None:
    whole = checkpoints.write(tmp_path, checkpoints.mixtral(), FineGrainedFP8Config()).folder

    def finer(tensors: Tensors) -> None:
        """The linears' scales are of such blocks, the experts' are not."""
        for key in [key for key in tensors if key.endswith("_scale_inv") and ".experts." not in key]:
            rows, columns = tensors[key.removesuffix("_scale_inv")].shape
            scale = tensors[key].repeat_interleave(2, 0).repeat_interleave(2, 1)
            tensors[key] = scale[: -(-rows // 64), : -(-columns // 64)]

    folder = rewrite(whole, tmp_path / "block", finer, weight_block_size=[64, 64])
    with pytest.raises(
        CheckpointError,
        match=r"layers.1.mlp.experts.gate_up_proj: .* need scales \(E, 6, 5\) with E = 8, one a block of \(64, 64\),"
        r" got \(8, 4, 3\)",
    ):
        moetor.AutoModelForCausalLM.from_pretrained(folder)


def test_experts_of_another_size_than_the_configs_are_named(tmp_path) -> None:
    whole = checkpoints.write(tmp_path, checkpoints.mixtral(), FineGrainedFP8Config()).folder
    said = json.loads((whole / "config.json").read_text()) | {"intermediate_size": 320}
    (whole / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"gate_up_proj needs shape \(8, 640, 288\), got \(8, 384, 288\)"):
        moetor.AutoModelForCausalLM.from_pretrained(whole)


def test_another_kind_of_fp8_is_not_read_as_e4m3(whole, tmp_path) -> None:
    folder = rewrite(
        whole, tmp_path / "e5m2", put(f"{LINEAR}.weight", lambda t: t.float().to(torch.float8_e5m2).view(t.shape))
    )
    with pytest.raises(
        CheckpointError,
        match=r"needs (a payload of .*_e4m3fn, got .*_e5m2|payload of F8_E4M3, got F8_E5M2: .*kv_a_proj)",
    ):
        moetor.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("missing", ["experts.3.w1.activation_scale", "w1.activation_scale"], ids=["one", "all"])
def test_static_scales_that_are_missing_are_named(tmp_path, missing) -> None:
    static = FineGrainedFP8Config(weight_block_size=None, activation_scheme="static")
    whole = checkpoints.write(tmp_path, checkpoints.mixtral(), static).folder
    folder = rewrite(whole, tmp_path / "broken", drop_all(missing))
    with pytest.raises(CheckpointError, match=r"layers\.[01]\.(block_sparse_moe|mlp)\.experts.*activation_scale"):
        moetor.AutoModelForCausalLM.from_pretrained(folder)


def test_fp4_of_a_size_that_it_cannot_have_is_refused(tmp_path) -> None:
    config = checkpoints.mixtral()
    config.intermediate_size = 199  # two numbers a byte, and 32 a scale
    whole = checkpoints.write(tmp_path, config, FineGrainedFP8Config()).folder
    folder = rewrite(whole, tmp_path / "odd", lambda tensors: None, expert_dtype="fp4")
    needed = r"layers.0.mlp.experts.down_proj in mxfp4.* needs an inner size divisible by 32, got 199"
    with pytest.raises(InvalidInput, match=needed):
        moetor.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("config", [None, FineGrainedFP8Config(dequantize=True)], ids=["fp8", "dequantized"])
def test_the_same_without_dequantising(whole, tmp_path, config) -> None:
    folder = rewrite(whole, tmp_path / "broken", drop(f"{EXPERT}.weight_scale_inv"))
    with pytest.raises(CheckpointError, match="experts.3.gate_proj.weight_scale_inv"):
        moetor.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def test_another_scale_fmt_than_its_scales_does_not_round_them(whole, tmp_path) -> None:
    """float32 scales stay float32 where the config says ue8m0, and powers of two become what they are."""
    said = rewrite(whole, tmp_path / "said", lambda tensors: None, scale_fmt="ue8m0")
    model, plain = (moetor.AutoModelForCausalLM.from_pretrained(folder) for folder in (said, whole))
    formats = {experts_of(module).format for module in model.modules() if is_experts(module)}
    assert formats == {"fp8"}
    with torch.no_grad():
        assert torch.equal(logits(model, tokens()), logits(plain, tokens()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float32, torch.bfloat16], ids=str)
def test_powers_of_two_are_read_from_any_dtype(tmp_path, dtype) -> None:
    torch.manual_seed(0)
    ue8m0 = FineGrainedFP8Config(scale_fmt="ue8m0")
    whole = checkpoints.write(tmp_path, checkpoints.deepseek_v3(), ue8m0).folder

    def stored(scale: Tensor) -> Tensor:
        return scale.view(torch.uint8) if dtype == torch.uint8 else scale.to(dtype)

    other = rewrite(whole, tmp_path / "other", put_all("_scale_inv", stored))
    with torch.no_grad():
        expected, got = (
            logits(moetor.AutoModelForCausalLM.from_pretrained(folder), tokens()) for folder in (whole, other)
        )
    assert torch.equal(got, expected)


def test_skipped_experts_stay_dense(whole, tmp_path) -> None:
    """A checkpoint whose config leaves a layer out holds it in bfloat16."""
    skipped = "model.layers.1.mlp.experts"

    def dequantized(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith(skipped) and key.endswith(".weight")]:
            scale = tensors.pop(f"{key}_scale_inv")
            tensors[key] = dequantize(tensors[key], scale, FineGrainedFP8Config().linear_format, torch.bfloat16)

    folder = rewrite(whole, tmp_path / "skipped", dequantized, modules_to_not_convert=[skipped, "lm_head"])
    model = moetor.AutoModelForCausalLM.from_pretrained(folder)
    assert experts_of(model.get_submodule(skipped)).format == "dense"
    model.save_pretrained(tmp_path / "again")
    again = moetor.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_a_config_of_another_method_is_refused(whole) -> None:
    theirs = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(InvalidInput, match="the checkpoint is quantised by 'fp8', got a config of 'bitsandbytes'"):
        moetor.AutoModelForCausalLM.from_pretrained(whole, quantization_config=theirs)


@pytest.mark.parametrize("entry", [{"scale_fmt": "fp16"}, {"activation_scheme": "per_token"}, {"expert_dtype": "int4"}])
def test_unknown_entries_of_the_config_are_refused(whole, tmp_path, entry) -> None:
    folder = rewrite(whole, tmp_path / "unknown", lambda tensors: None, **entry)
    (name,) = entry
    with pytest.raises(InvalidInput, match=f"{name} must be one of"):
        moetor.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (torch.ones(4, 4).to(torch.float8_e4m3fn), "lacks the scales of kv_a.weight"),
        (torch.ones(4, 4).to(torch.float8_e5m2), "does not fit: kv_a.weight needs a payload of .*e4m3fn, got .*e5m2"),
    ],
)
def test_the_operation_itself_finds_what_cannot_be_read(payload, said) -> None:
    """Files of another kind than safetensors are not looked at beforehand."""
    model = torch.nn.ModuleDict({"kv_a": torch.nn.Linear(4, 4, bias=False, device="meta", dtype=torch.bfloat16)})
    operation = Dequantize(FineGrainedFP8Config())
    parts = {operation.PATTERNS[0]: [payload]}
    if payload.dtype == torch.float8_e5m2:
        parts[operation.PATTERNS[1]] = [torch.ones(1, 1)]
    operation.convert(parts, full_layer_name="kv_a.weight", model=model)
    (problem,) = operation.problems
    assert re.fullmatch(said, problem)


def test_a_norms_scale_is_not_taken_for_a_matrixs() -> None:
    renamings = _renamed_scales({"layers.0.q_norm.scale", "layers.0.wq.weight"})
    names = {"layers.0.q_norm.scale": "layers.0.q_norm.scale", "layers.0.wq.scale": "layers.0.wq.weight_scale_inv"}
    for name, expected in names.items():
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        assert name == expected


def test_partial_blocks_of_deepseek_v3_are_dequantised() -> None:
    """kv_a_proj_with_mqa, 576 × 7168 with 5 × 56 scales: the last 64 rows have half a block."""
    weight = torch.randn(576, 7168)
    payload, scale = quantize(weight, FineGrainedFP8Config().linear_format)
    assert scale.shape == (5, 56)
    model = torch.nn.ModuleDict({"kv_a": torch.nn.Linear(7168, 576, bias=False, device="meta", dtype=torch.bfloat16)})
    operation = Dequantize(FineGrainedFP8Config())
    parts = {operation.PATTERNS[0]: [payload], operation.PATTERNS[1]: [scale]}
    (dense,) = operation.convert(parts, full_layer_name="kv_a.weight", model=model).values()
    assert operation.done == ["kv_a.weight"]
    rows = torch.arange(576) // 128
    expected = payload.float() * scale[rows].repeat_interleave(128, 1)
    assert torch.equal(dense, expected.bfloat16())
    assert ((dense.float() - weight).norm() / weight.norm()).item() < 0.03
