"""Checkpoint folders in a quantised format, and their dequantised twins, written with safetensors.

What a real checkpoint looks like: one tensor an expert with its scale beside it, linears quantised
too, lm_head and router as they are, `quantization_config` in config.json. The twin holds the same
numbers in float32 and says nothing of quantisation.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from moetor.core.formats import Format
from moetor.quantization import FineGrainedFP8Config, dequantize, quantize

from .configs import _MOE, _SMALL, E, K
from .models import build

Tensors = dict[str, Tensor]

# two and a quarter, and one and a half, times 128: blocks are partial, and MXFP4 has whole ones
HIDDEN, INTER = 288, 192


def deepseek_v3() -> PreTrainedConfig:
    """kv_a_proj has 48 + 16 = 64 rows and 288 columns: one partial block high, three wide; a shared expert, groups."""
    heads = {"kv_lora_rank": 48, "q_lora_rank": 160, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    groups = {"n_routed_experts": E, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTER, "num_key_value_heads": 4}
    return transformers.DeepseekV3Config(**{**_SMALL, **_MOE, **heads, **groups, **sizes})


def deepseek_v4() -> PreTrainedConfig:
    """w1, w2 and w3, scales under `.scale`, a clamp of the gate that is reached."""
    attention = {"q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "head_dim": 32, "num_key_value_heads": 1}
    indexer = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "sliding_window": 8}
    experts = {"n_routed_experts": E, "n_shared_experts": 1, "intermediate_size": INTER, "swiglu_limit": 0.5}
    return transformers.DeepseekV4Config(**{**_SMALL, **_MOE, **attention, **indexer, **experts, "hidden_size": HIDDEN})


def mixtral() -> PreTrainedConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_local_experts": E, "num_experts_per_tok": K}
    return transformers.MixtralConfig(**{**_SMALL, **sizes})


def gpt_oss() -> PreTrainedConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_local_experts": E, "num_experts_per_tok": K}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return transformers.GptOssConfig(**{**_SMALL, **sizes}, head_dim=16, rope_parameters=rope, swiglu_limit=0.5)


# Parts of the names of matrices that no such checkpoint quantises.
NOT_QUANTIZED = (".embed_tokens.", ".lm_head.", ".head.", ".gate.", "norm.")


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint and its dense twin.

    Attributes:
        quantized: number of matrices that were quantised.
    """

    folder: Path
    twin: Path
    quantized: int


def dense_model(config: PreTrainedConfig) -> PreTrainedModel:
    """In bfloat16, its experts not so small that nobody would miss them."""
    return build("", config).bfloat16()


def write(
    folder: Path, config: PreTrainedConfig, quantization: FineGrainedFP8Config, scale: str = "weight_scale_inv"
) -> Written:
    """FP8 or FP4 experts, FP8 linears; each scale beside its matrix under the name `scale`."""
    tensors = _saved(dense_model(config), folder / "twin")
    twin_tensors, count = dict(tensors), 0
    for key, tensor in list(tensors.items()):
        stem = key.removesuffix(".weight")
        if tensor.dim() != 2 or stem == key or any(part in f".{stem}." for part in NOT_QUANTIZED):
            continue
        format = quantization.expert_format if ".experts." in key else quantization.linear_format
        payload, scales = quantize(tensor, format)
        tensors[key], tensors[f"{stem}.{scale}"] = payload, scales.reshape(()) if scales.numel() == 1 else scales
        if format.activation_scheme == "static":
            # of each its own, and large enough for what they meet
            tensors[f"{stem}.activation_scale"] = torch.tensor(0.3 + 0.04 * (count % 7))
        twin_tensors[key] = dequantize(payload, scales, format)
        count += 1
    _store(folder / "quantized", folder / "twin", tensors, quantization.to_dict())
    save_file(twin_tensors, folder / "twin" / "model.safetensors", {"format": "pt"})
    return Written(folder / "quantized", folder / "twin", count)


def write_blocks(folder: Path, config: PreTrainedConfig, format: Format) -> Written:
    """gpt-oss: experts as blocks and scales of uint8, (E, N, K/32, 16) and (E, N, K/32); the rest as it is."""
    model = dense_model(config)
    tensors = _saved(model, folder / "twin")
    twin_tensors, count = dict(tensors), 0
    for key, tensor in list(tensors.items()):
        if ".experts." in key and tensor.dim() == 3:
            payload, scale = quantize(tensor.transpose(1, 2), format)
            E, N, half = payload.shape
            del tensors[key]
            tensors[f"{key}_blocks"] = payload.view(torch.uint8).view(E, N, half // 16, 16)
            tensors[f"{key}_scales"] = scale.view(torch.uint8)
            back = dequantize(payload, scale, format)
            twin_tensors[key] = back.transpose(1, 2).contiguous()
            count += 1
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    _store(folder / "quantized", folder / "twin", tensors, entry)
    save_file(twin_tensors, folder / "twin" / "model.safetensors", {"format": "pt"})
    return Written(folder / "quantized", folder / "twin", count)


def rewrite(whole: Path, folder: Path, change: Callable[[Tensors], object], **config: object) -> Path:
    """A copy with its tensors, and entries of its quantization_config, changed."""
    shutil.copytree(whole, folder)
    tensors = load_file(whole / "model.safetensors")
    change(tensors)
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def _saved(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _store(folder: Path, twin: Path, tensors: dict[str, Tensor], entry: dict) -> None:
    folder.mkdir()
    config = json.loads((twin / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
