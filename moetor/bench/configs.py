"""The experts of a model from its config.json: sizes and gate, read as data; no model is built."""

import json
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from .shapes import Shape

# As models' configs call them; the first that is there counts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")
_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


def shape_of_model(path: str) -> Shape:
    """The shape of a model's routed experts.

    Args:
        path: a folder with a config.json, or such a file.

    Raises:
        InvalidInput: no such file, or a config without experts, or with a gate that the bench has not.

    A text model inside a multimodal one is found by its `text_config`.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidInput(f"--model needs a folder with a config.json, or that file, got {path}: {error}") from error
    for part in (config, config.get("text_config"), config.get("language_config")):
        if isinstance(part, dict) and any(part.get(key) for key in _EXPERTS):
            return _shape(part, file.resolve().parent.name)
    raise InvalidInput(f"{file} names no experts: none of {', '.join(_EXPERTS)}")


def _shape(config: dict[str, Any], name: str) -> Shape:
    E, K, I = (_first(config, keys) for keys in (_EXPERTS, _TOP_K, _INTERMEDIATE))
    kind = str(config.get("model_type", name))
    sizes = E, K, int(config["hidden_size"]), I
    if kind == "gpt_oss":
        return Shape(name, kind, *sizes, "gpt_oss", bias=True, interleaved=True, transposed=True)
    gate = config.get("hidden_act", "silu")
    if gate not in ("silu", "swish"):
        raise InvalidInput(f"the bench has experts with the gate silu and those of gpt_oss, got {gate} ({kind})")
    return Shape(name, kind, *sizes)


def _first(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise InvalidInput(f"a config with experts needs one of {', '.join(keys)}")
