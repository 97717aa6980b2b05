"""Small models of many architectures: a config for each name, and weights that let a test see faults.

At default initialisation expert biases are zero, clamps are never reached, and zeroing all experts
hardly moves the logits. `build` therefore draws experts from N(0, 0.3) and embeddings from N(0, 1),
and sets limits to 0.5.
"""

import math
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from moetor.integrations.transformers.adapters import is_experts

from .configs import _SMALL, CONFIGS, LIMIT, VOCAB, E, H, I, K  # noqa: F401  the sizes are for tests


def dense() -> PreTrainedConfig:
    """A model without any experts."""
    return transformers.LlamaConfig(**_SMALL, intermediate_size=48)


_AUTO = {
    "qwen3_vl_moe": "AutoModelForImageTextToText",
    "qwen3_omni_moe": "AutoModelForMultimodalLM",
    "aria": "AutoModelForImageTextToText",
    "step3p7": "AutoModelForImageTextToText",
    "switch_transformers": "AutoModelForSeq2SeqLM",
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
        if is_experts(module) and getattr(module, "limit", math.inf) < math.inf:  # step3p7 has layers without
            module.limit = LIMIT


def tokens(num: int = 12) -> Tensor:
    """(2, num) ids that stand for text in every model here."""
    return torch.randint(3, 48, (2, num), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Of every part that has a head; the omni model has a thinker and a talker and no forward of its own."""
    if model.config.is_encoder_decoder:
        return model(input_ids=input_ids, decoder_input_ids=input_ids).logits
    if not hasattr(model, "thinker"):
        return model(input_ids=input_ids).logits
    said = model.thinker(input_ids=input_ids).logits
    embeds = model.talker.get_input_embeddings()(input_ids)
    positions = torch.arange(input_ids.shape[1]).expand(3, *input_ids.shape)
    spoken = model.talker(inputs_embeds=embeds, position_ids=positions).logits
    return torch.cat([said, spoken], dim=-1)
