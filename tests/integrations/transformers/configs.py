"""Small configs of many architectures, by name. `models.py` builds models of them."""

from collections.abc import Callable

import transformers
from transformers import PreTrainedConfig

from . import old_models

VOCAB, H, I, E, K = 64, 32, 24, 8, 2
ZERO_EXPERTS = 4
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
_MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
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
    groups = {"n_routed_experts": E, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return transformers.DeepseekV3Config(**{**_SMALL, **_MOE, **_MLA, **groups, "num_key_value_heads": 4})


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


def _deepseek_v2() -> PreTrainedConfig:
    moe = {"n_routed_experts": E, "n_shared_experts": 1, "topk_method": "greedy", "first_k_dense_replace": 1}
    return transformers.DeepseekV2Config(**{**_SMALL, **_MOE, **_MLA, **moe, "num_key_value_heads": 4})


def _deepseek_v4() -> PreTrainedConfig:
    heads = {"head_dim": 16, "qk_rope_head_dim": 8}
    # its intermediate_size is that of the experts
    moe = {**_MOE, "intermediate_size": I, "n_routed_experts": E, "swiglu_limit": LIMIT}
    return transformers.DeepseekV4Config(**_SMALL, **moe, **heads)


def _granitemoe() -> PreTrainedConfig:
    return transformers.GraniteMoeConfig(**_SMALL, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)


def _glm4_moe() -> PreTrainedConfig:
    groups = {"n_routed_experts": E, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return transformers.Glm4MoeConfig(**_SMALL, **_MOE, **groups, head_dim=8)


def _ernie4_5_moe() -> PreTrainedConfig:
    moe = {"moe_intermediate_size": I, "moe_num_experts": E, "moe_k": K, "moe_layer_start_index": 0}
    return transformers.Ernie4_5_MoeConfig(**_SMALL, **moe, intermediate_size=48)


def _phimoe() -> PreTrainedConfig:
    return transformers.PhimoeConfig(**_SMALL, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)


def _llama4(top_k: int = 1) -> PreTrainedConfig:
    moe = {"num_local_experts": E, "num_experts_per_tok": top_k, "interleave_moe_layer_step": 1}
    sizes = {"intermediate_size": I, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 64}
    return transformers.Llama4TextConfig(**_SMALL, **moe, **sizes)


def _dbrx() -> PreTrainedConfig:
    names = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    names |= {"max_position_embeddings": "max_seq_len", "num_key_value_heads": ""}
    small = {names.get(name, name): value for name, value in _SMALL.items() if names.get(name, name)}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}
    ffn = {"ffn_hidden_size": I, "moe_num_experts": E, "moe_top_k": K, "hidden_size": H}
    return transformers.DbrxConfig(**small, attn_config=attention, ffn_config=ffn)


def _longcat_flash() -> PreTrainedConfig:
    small = {name: value for name, value in _SMALL.items() if name != "num_hidden_layers"}
    moe = {"expert_ffn_hidden_size": I, "n_routed_experts": E, "zero_expert_num": ZERO_EXPERTS, "moe_topk": 3}
    sizes = {"num_layers": 2, "ffn_hidden_size": 48, "num_key_value_heads": 4, "head_dim": 8}
    return transformers.LongcatFlashConfig(**{**small, **_MLA, **moe, **sizes})


def _jetmoe() -> PreTrainedConfig:
    small = {name: value for name, value in _SMALL.items() if name != "num_attention_heads"}
    moe = {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": K}
    return transformers.JetMoeConfig(**small, **moe, kv_channels=8)


def _step3p7() -> PreTrainedConfig:
    moe = {"moe_intermediate_size": I, "share_expert_dim": I, "n_routed_experts": E, "num_experts_per_tok": K}
    layers = {"mlp_layer_types": ["sparse", "sparse"], "swiglu_limits": [LIMIT, 0.0], "sliding_window": 8}
    text = {**_SMALL, **moe, **layers, "intermediate_size": 48, "head_dim": 8}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "mlp_ratio": 1.0}
    return transformers.Step3p7Config(text_config=text, vision_config=vision, image_token_id=60)


def _switch_transformers() -> PreTrainedConfig:
    sizes = {"vocab_size": VOCAB, "d_model": H, "d_kv": 8, "d_ff": I, "num_heads": 4, "num_layers": 2}
    layers = {"num_sparse_encoder_layers": 1, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    # a capacity that some tokens exceed
    return transformers.SwitchTransformersConfig(**sizes, **layers, **tokens, num_experts=E, expert_capacity=3)


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
    "deepseek_v2": _deepseek_v2,
    "deepseek_v4": _deepseek_v4,
    "granitemoe": _granitemoe,
    "glm4_moe": _glm4_moe,
    "ernie4_5_moe": _ernie4_5_moe,
    "phimoe": _phimoe,
    "llama4": _llama4,
    "llama4_top2": lambda: _llama4(top_k=2),
    "dbrx": _dbrx,
    "longcat_flash": _longcat_flash,
    "jetmoe": _jetmoe,
    "step3p7": _step3p7,
    "switch_transformers": _switch_transformers,
    "old_mixtral": old_models.CONFIGS[old_models.MixtralLike].small,
    "old_qwen2_moe": old_models.CONFIGS[old_models.Qwen2MoeLike].small,
    "old_deepseek": old_models.CONFIGS[old_models.DeepseekLike].small,
}
