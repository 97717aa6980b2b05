"""What runs where in a model, and why every other backend does not."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ... import forward
from ...core.interface import Call, ExpertsInterface, Explanation
from .adapters import experts_of
from .choice import backend_of, config_keys, experts_by_key

# A token of decoding and a prompt.
_TOKENS = (1, 512)
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "top_k")


@dataclass(frozen=True, slots=True)
class PartExplanation:
    """The experts under one key of the config.

    Attributes:
        key: of the sub-config, "" for the model's own.
        layers: number of experts modules.
        about: sizes, dtype, gate and device.
        by_tokens: an explanation for each number of tokens looked at.
    """

    key: str
    layers: int
    about: str
    by_tokens: dict[int, Explanation]


@dataclass(frozen=True, slots=True)
class ModelExplanation:
    """Of a whole model; `str()` is for reading, `as_dict()` for machines."""

    model: str
    parts: tuple[PartExplanation, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "parts": [
                {
                    "key": part.key,
                    "layers": part.layers,
                    "about": part.about,
                    "tokens": {str(tokens): why.as_dict() for tokens, why in part.by_tokens.items()},
                }
                for part in self.parts
            ],
        }

    def __str__(self) -> str:
        if not self.parts:
            return f"{self.model} has no experts that moetor runs"
        lines = [self.model]
        for part in self.parts:
            lines.append(f"{part.key or '(model)'}: {part.layers} layers, {part.about}")
            for tokens, why in part.by_tokens.items():
                lines += [f"  {tokens} token{'s' if tokens > 1 else ''}: {line}" for line in str(why).splitlines()[:1]]
                lines += [f"  {line}" for line in str(why).splitlines()[1:]]
        return "\n".join(lines)


def explain_model(model: PreTrainedModel) -> ModelExplanation:
    """Ask every backend about the first experts module of each part, at a few sizes."""
    configs = config_keys(model.config)
    parts = []
    for key, modules in experts_by_key(model).items():
        weights = experts_of(modules[0])
        top_k = min(_top_k(configs[key]), weights.num_experts)
        gate = weights.activation.kind + (" with clamps or soft-caps" if not weights.activation.plain else "")
        about = (
            f"{weights.num_experts} experts, top {top_k}, {weights.hidden_size} to {weights.intermediate_size},"
            f" {str(weights.dtype).removeprefix('torch.')} on {weights.device}, {gate if weights.gated else 'no'} gate"
        )
        by_tokens = {}
        for tokens in _TOKENS:
            call = Call(
                tokens, top_k, weights.hidden_size, weights.dtype, weights.device, needs_grad=torch.is_grad_enabled()
            )
            by_tokens[tokens] = ExpertsInterface.explain(weights, call, forward.OVERRIDE or backend_of(modules[0]))
        parts.append(PartExplanation(key, len(modules), about, by_tokens))
    return ModelExplanation(type(model).__name__, tuple(parts))


def _top_k(config: Any) -> int:
    """Experts per token, by the names that configs have for it; 1 if it has none of them."""
    for name in _TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 1
