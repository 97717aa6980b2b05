"""Small models of many architectures: a config for each name, and weights that let a test see faults.

At default initialisation expert biases are zero, clamps are never reached, and zeroing all experts
hardly moves the logits. `build` therefore draws experts from N(0, 0.3) and embeddings from N(0, 1),
and sets limits to 0.5.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from moetor.integrations.transformers.adapters import is_experts

VOCAB, H, I, E, K = 64, 32, 24, 8, 2
LIMIT = 0.5

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": K, "moe_intermediate_size": I, "intermediate_size": 48}
_SHARED = {"shared_expert_intermediate_size": I}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": H,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def _mixtral() -> PreTrainedConfig:
    return transformers.MixtralConfig(**_SMALL, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)


def _qwen2_moe() -> PreTrainedConfig:
    return transformers.Qwen2MoeConfig(**_SMALL, **_MOE, **_SHARED, num_experts=E)


def _qwen3_moe() -> PreTrainedConfig:
    return transformers.Qwen3MoeConfig(**_SMALL, **_MOE, head_dim=8, num_experts=E)


def _qwen3_vl_moe() -> PreTrainedConfig:
    text = {**_SMALL, **_MOE, "head_dim": 8, "num_experts": E, "rope_parameters": _MROPE}
    tokens = dict(zip(("image_token_id", "video_token_id", "vision_start_token_id"), (60, 61, 62), strict=True))
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=_VISION, **tokens)


def _qwen3_omni_moe() -> PreTrainedConfig:
    text = {**_SMALL, **_MOE, "head_dim": 8, "num_experts": E, "rope_parameters": _MROPE}
    audio = {
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "d_model": 16,
        "output_dim": H,
        "num_mel_bins": 16,
        "downsample_hidden_size": 16,
    }
    names = ("audio_token_id", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    names += ("audio_start_token_id", "audio_end_token_id")
    tokens = dict(zip(names, range(VOCAB - len(names), VOCAB), strict=True))
    thinker = {"text_config": text, "vision_config": _VISION, "audio_config": audio, **tokens}
    talker = {
        "text_config": {**text, **_SHARED},
        "code_predictor_config": {**_SMALL, "intermediate_size": 16, "head_dim": 8, "num_code_groups": 4},
        "num_code_groups": 4,
        "thinker_hidden_size": H,
        "accept_hidden_layer": 1,
        "spatial_merge_size": 2,
        **tokens,
    }
    wave = {
        "codebook_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "num_quantizers": 4,
        "upsample_rates": [2],
        "upsampling_ratios": [2],
        "decoder_dim": 16,
    }
    return transformers.Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=wave)


def _deepseek_v3() -> PreTrainedConfig:
    heads = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    groups = {"n_routed_experts": E, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return transformers.DeepseekV3Config(**{**_SMALL, **_MOE, **heads, **groups, "num_key_value_heads": 4})


def _gpt_oss() -> PreTrainedConfig:
    sizes = {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": K, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return transformers.GptOssConfig(**_SMALL, **sizes, rope_parameters=rope, swiglu_limit=LIMIT)


def _olmoe() -> PreTrainedConfig:
    return transformers.OlmoeConfig(**_SMALL, intermediate_size=I, num_experts=E, num_experts_per_tok=K)


def _aria() -> PreTrainedConfig:
    text = transformers.AriaTextConfig(**_SMALL, intermediate_size=I, moe_num_experts=E, moe_topk=K)
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    return transformers.AriaConfig(text_config=text, vision_config=vision, projector_patch_to_query_dict={4: 2})


def _nemotron_h() -> PreTrainedConfig:
    small = {name: value for name, value in _SMALL.items() if name != "num_hidden_layers"}
    mamba = {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8}
    moe = {"n_routed_experts": E, "moe_shared_expert_intermediate_size": I}
    layers = ["mamba", "moe", "attention", "moe"]
    return transformers.NemotronHConfig(**small, **_MOE, **mamba, **moe, head_dim=8, layers_block_type=layers)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_omni_moe": _qwen3_omni_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "olmoe": _olmoe,
    "aria": _aria,
    "nemotron_h": _nemotron_h,
}


def dense() -> PreTrainedConfig:
    """A model without any experts."""
    return transformers.LlamaConfig(**_SMALL, intermediate_size=48)


_AUTO = {
    "qwen3_vl_moe": "AutoModelForImageTextToText",
    "qwen3_omni_moe": "AutoModelForMultimodalLM",
    "aria": "AutoModelForImageTextToText",
}


def auto_class(name: str, library: Any = transformers) -> Any:
    """The Auto class that loads this architecture, of transformers or of moetor."""
    return getattr(library, _AUTO.get(name, "AutoModelForCausalLM"))


def build(name: str, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """The plain transformers model with its own eager experts and the weights that the page's head tells."""
    config = CONFIGS[name]() if config is None else config
    model: PreTrainedModel = auto_class(name).from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for module in model.modules():
            if is_experts(module):
                for parameter in module.parameters():
                    parameter.normal_(0, 0.3)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 1)
    set_limits(model)
    return model


def set_limits(model: nn.Module) -> None:
    """Older releases of transformers write the clamp of gpt_oss into the class; no config has it."""
    for module in model.modules():
        if is_experts(module) and hasattr(module, "limit"):
            module.limit = LIMIT


def tokens(num: int = 12) -> Tensor:
    """(2, num) ids that stand for text in every model here."""
    return torch.randint(3, 48, (2, num), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Of every part that has a head; the omni model has a thinker and a talker and no forward of its own."""
    if not hasattr(model, "thinker"):
        return model(input_ids=input_ids).logits
    said = model.thinker(input_ids=input_ids).logits
    embeds = model.talker.get_input_embeddings()(input_ids)
    positions = torch.arange(input_ids.shape[1]).expand(3, *input_ids.shape)
    spoken = model.talker(inputs_embeds=embeds, position_ids=positions).logits
    return torch.cat([said, spoken], dim=-1)
