"""What runs where in a model, and why every other backend does not."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ... import forward
from ...core.interface import Call, ExpertsInterface, Explanation
from . import decode
from .adapters import experts_of
from .choice import backend_of, config_keys, experts_by_key, unreadable
from .offload import execution_device
from .prepared import with_prepared
from .quantized_loading import notes_on
from .top_k import top_k_of

# A token of decoding and a prompt.
_TOKENS = (1, 512)


@dataclass(frozen=True, slots=True)
class PartExplanation:
    """The experts under one key of the config.

    Attributes:
        key: of the sub-config, "" for the model's own.
        layers: number of experts modules.
        about: sizes, dtype, gate and device.
        by_tokens: an explanation for each number of tokens looked at.
        decode: what runs instead while `generate` decodes; None: the same.
    """

    key: str
    layers: int
    about: str
    by_tokens: dict[int, Explanation]
    decode: str | None = None

    def line(self) -> str:
        """What runs, in some words; numbers of tokens are told only where they decide."""
        if not self.by_tokens:
            return f"{self.key or 'experts'} {self.about} ({self.layers} layers)"
        requested = next(iter(self.by_tokens.values())).requested
        by_name: dict[str, list[str]] = {}
        for tokens, why in self.by_tokens.items():
            by_name.setdefault(why.chosen or f"nothing yet ({why.reasons.get(requested)})", []).append(str(tokens))
        here = ", ".join(f"{name} at {'/'.join(tokens)} tokens" for name, tokens in by_name.items())
        if len(by_name) == 1:
            here = next(iter(by_name))
        words = [f"{self.key or 'experts'} by {requested}"]
        words += [f"here {here}"] if here != requested else []
        words += [f"while generate decodes {self.decode}"] if self.decode else []
        return f"{', '.join(words)} ({self.layers} layers, {self.about})"


@dataclass(frozen=True, slots=True)
class ModelExplanation:
    """Of a whole model; `str()` is for reading, `as_dict()` for machines.

    Attributes:
        notes: sentences on the rest of the model.
    """

    model: str
    parts: tuple[PartExplanation, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "parts": [
                {
                    "key": part.key,
                    "layers": part.layers,
                    "about": part.about,
                    "tokens": {str(tokens): why.as_dict() for tokens, why in part.by_tokens.items()},
                    "decode": part.decode,
                }
                for part in self.parts
            ],
            "notes": list(self.notes),
        }

    def line(self) -> str:
        """What runs where, without reasons, in one line."""
        if not self.parts:
            return str(self)
        return f"{self.model}: " + " | ".join(part.line() for part in self.parts)

    def __str__(self) -> str:
        if not self.parts:
            return f"{self.model} has no experts that moetor runs"
        lines = [self.model]
        for part in self.parts:
            lines.append(f"{part.key or '(model)'}: {part.layers} layers, {part.about}")
            for tokens, why in part.by_tokens.items():
                lines += [f"  {tokens} token{'s' if tokens > 1 else ''}: {line}" for line in str(why).splitlines()[:1]]
                lines += [f"  {line}" for line in str(why).splitlines()[1:]]
            if part.decode:
                lines.append(f"  while generate decodes: {part.decode}")
        lines += self.notes
        return "\n".join(lines)


def explain_model(model: PreTrainedModel) -> ModelExplanation:
    """Ask every backend about the first experts module of each part, at a few sizes."""
    configs = config_keys(model.config)
    parts = []
    for key, modules in experts_by_key(model).items():
        if reason := unreadable(modules[0]):
            parts.append(PartExplanation(key, len(modules), f"run by transformers: {reason}", {}))
            continue
        weights, name = with_prepared(modules[0], experts_of(modules[0])), backend_of(modules[0])
        device = execution_device(modules[0], weights.device)
        place = f"{device}, offloaded" if device != weights.device else f"{device}"
        dtype = model.dtype if weights.quantized else weights.dtype
        stored = weights.format if weights.quantized else str(dtype).removeprefix("torch.")
        top_k = min(top_k_of(configs[key]), weights.num_experts)
        gate = weights.activation.kind + (" with clamps or soft-caps" if not weights.activation.plain else "")
        about = (
            f"{weights.num_experts} experts, top {top_k}, {weights.hidden_size} to {weights.intermediate_size},"
            f" {stored} on {place}, {gate if weights.gated else 'no'} gate"
        )
        by_tokens = {}
        for tokens in _TOKENS:
            call = Call(tokens, top_k, weights.hidden_size, dtype, device, needs_grad=torch.is_grad_enabled())
            by_tokens[tokens] = ExpertsInterface.explain(weights, call, forward.OVERRIDE or name)
        decoding = decode.explanation(name, weights, top_k, device)
        parts.append(PartExplanation(key, len(modules), about, by_tokens, decoding))
    return ModelExplanation(type(model).__name__, tuple(parts), tuple(notes_on(model)))
