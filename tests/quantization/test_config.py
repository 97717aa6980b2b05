"""Configs of quantised checkpoints: fields, aliases, and what is refused."""

import pytest
import transformers

from moetor import InvalidInput
from moetor.quantization import FineGrainedFP8Config


@pytest.mark.parametrize(
    ("fields", "experts", "linears"),
    [
        ({}, "fp8", "fp8"),
        ({"scale_fmt": "ue8m0"}, "fp8_e8m0", "fp8_e8m0"),
        ({"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, "mxfp4_dynamic", "fp8_e8m0"),
        ({"weight_block_size": None, "activation_scheme": "static"}, "fp8_tensor_static", "fp8_tensor_static"),
        ({"weight_block_size": [64, 32], "activation_scheme": None}, "fp8_64x32_weights", "fp8_64x32_weights"),
        ({"expert_dtype": "fp4", "activation_scheme": None}, "mxfp4_float32", "fp8_weights"),
    ],
)
def test_fields_mean_formats(fields: dict, experts: str, linears: str) -> None:
    config = FineGrainedFP8Config(**fields)
    assert (config.expert_format.name, config.linear_format.name) == (experts, linears)
    again = FineGrainedFP8Config.of(config.to_dict())
    assert again == config


def test_transformers_object_says_the_same() -> None:
    theirs = transformers.FineGrainedFP8Config(
        weight_block_size=(64, 64), scale_fmt="ue8m0", modules_to_not_convert=["lm_head"], dequantize=True
    )
    ours = FineGrainedFP8Config.of(theirs)
    assert ours.linear_format.name == "fp8_64x64_e8m0"
    assert ours.modules_to_not_convert == ["lm_head"]
    assert ours.dequantize
    back = transformers.FineGrainedFP8Config.from_dict(ours.to_dict())
    assert (back.weight_block_size, back.scale_fmt, back.dequantize) == ([64, 64], "ue8m0", True)


def test_fields_that_nobody_knows_are_left_out() -> None:
    """Checkpoints say more about themselves than loading needs."""
    config = FineGrainedFP8Config.of({"quant_method": "fp8", "fmt": "e4m3", "ignored_layers": ["gate"]})
    assert config.modules_to_not_convert == ["gate"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_scheme": "per_token"}, r"activation_scheme must be one of .*got 'per_token'"),
        ({"scale_fmt": "fp16"}, r"scale_fmt must be one of \('float', 'ue8m0'\), got 'fp16'"),
        ({"expert_dtype": "int4"}, "expert_dtype must be one of .*got 'int4'"),
        ({"weight_block_size": (128,)}, r"weight_block_size must be two positive numbers or None, got \(128,\)"),
        ({"weight_block_size": (128, 0)}, r"got \(128, 0\)"),
    ],
)
def test_what_is_no_value_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        FineGrainedFP8Config(**fields)


def test_another_method_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs quant_method 'fp8', got 'awq'"):
        FineGrainedFP8Config.of({"quant_method": "awq"})
