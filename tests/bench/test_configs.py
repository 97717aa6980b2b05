"""Shapes from configs as models have them."""

import json
from pathlib import Path

import pytest

from moetor.bench.configs import shape_of_model
from moetor.core.errors import InvalidInput

QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768}
CONFIGS = {
    "qwen3_moe": (
        QWEN | {"model_type": "qwen3_moe", "hidden_act": "silu", "intermediate_size": 6144},
        (128, 8, 2048, 768),
    ),
    "mixtral": (
        {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 4096, "intermediate_size": 14336},
        (8, 2, 4096, 14336),
    ),
    "deepseek": (
        {"n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168, "moe_intermediate_size": 2048},
        (256, 8, 7168, 2048),
    ),
    "multimodal": ({"model_type": "qwen3_vl_moe", "text_config": QWEN}, (128, 8, 2048, 768)),
}


def write(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_read(name: str, tmp_path: Path) -> None:
    config, sizes = CONFIGS[name]
    shape = shape_of_model(write(tmp_path, config))
    assert (shape.experts, shape.top_k, shape.hidden, shape.intermediate) == sizes
    assert shape.plain
    assert shape_of_model(str(tmp_path / "config.json")) == shape


def test_gpt_oss_has_its_gate_and_storage(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_size": 2880}
    shape = shape_of_model(write(tmp_path, config | {"intermediate_size": 2880, "hidden_act": "silu"}))
    assert (shape.gate, shape.bias, shape.interleaved, shape.transposed) == ("gpt_oss", True, True, True)


def test_installed_transformers_configs_are_read(tmp_path: Path) -> None:
    from transformers import MixtralConfig, Qwen2MoeConfig

    Qwen2MoeConfig().save_pretrained(tmp_path)
    shape = shape_of_model(str(tmp_path))
    assert (shape.experts, shape.top_k, shape.hidden, shape.intermediate) == (60, 4, 2048, 1408)
    MixtralConfig().save_pretrained(tmp_path)
    assert shape_of_model(str(tmp_path)).experts == 8


@pytest.mark.parametrize(
    ("config", "words"),
    [({"hidden_size": 8}, "names no experts"), (QWEN | {"hidden_act": "relu"}, "gate"), ({"num_experts": 4}, "one of")],
)
def test_what_cannot_be_read_is_refused(config: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=words):
        shape_of_model(write(tmp_path, config))
    with pytest.raises(InvalidInput, match="config.json"):
        shape_of_model(str(tmp_path / "nowhere"))
