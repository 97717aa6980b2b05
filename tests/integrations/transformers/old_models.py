"""Strangers' models: blocks that loop over a ModuleList of MLPs, in the ways that code before transformers 5 does.

Each is a Llama whose MLPs are exchanged for such blocks, registered with transformers' Auto classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

E, K, H, I = 8, 2, 32, 24


class ThreeLinears(nn.Module):
    """Names as in Mixtral: w1 is the gate, w3 what it multiplies, w2 comes back."""

    def __init__(self, hidden: int = H, inner: int = I) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class NamedProjections(nn.Module):
    """Names as in Llama."""

    def __init__(self, hidden: int = H, inner: int = I) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def loop(experts: nn.ModuleList, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """One expert after another, each on its tokens."""
    out = torch.zeros_like(x_TH)
    for number, expert in enumerate(experts):
        token, slot = (index_TK == number).nonzero(as_tuple=True)
        out.index_add_(0, token, (expert(x_TH[token]) * weights_TK[token, slot, None]).to(out.dtype))
    return out


class MixtralLike(nn.Module):
    """Softmax, the K largest, made to add up to 1; returns the router's logits, too; noise if asked for."""

    def __init__(self, jitter: float = 0.0) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.jitter = K, E, jitter
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(ThreeLinears() for _ in range(E))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.jitter > 0:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1 - self.jitter, 1 + self.jitter)
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(x_TH)
        weights, index = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x_TH.dtype)
        return loop(self.experts, x_TH, index, weights).view(hidden_states.shape), logits


class Qwen2MoeLike(nn.Module):
    """Weights as the softmax gives them, and an expert for all tokens behind a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts_per_tok = K
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(NamedProjections() for _ in range(E))
        self.shared_expert = NamedProjections(H, 2 * I)
        self.shared_expert_gate = nn.Linear(H, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(x_TH)
        weights, index = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.num_experts_per_tok, dim=-1)
        out = loop(self.experts, x_TH, index, weights.to(x_TH.dtype))
        out = out + torch.sigmoid(self.shared_expert_gate(x_TH)) * self.shared_expert(x_TH)
        return out.reshape(hidden_states.shape), logits


class GroupedGate(nn.Module):
    """As in DeepSeek-V3: sigmoid scores, a bias that takes part in choosing only, the better of two groups."""

    def __init__(self, loss: bool = False) -> None:
        super().__init__()
        self.top_k, self.scale, self.loss = K, 2.5, loss
        self.weight = nn.Parameter(torch.randn(E, H) * H**-0.5)
        self.register_buffer("e_score_correction_bias", torch.randn(E) * 0.1)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        scores = F.linear(hidden_states.view(-1, hidden_states.shape[-1]).float(), self.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        groups = choice.view(-1, 2, E // 2)
        best = groups.topk(2, dim=-1).values.sum(-1).argmax(-1)
        open_TE = F.one_hot(best, 2).repeat_interleave(E // 2, dim=1).bool()
        index = choice.masked_fill(~open_TE, float("-inf")).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, index)
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        if self.loss:
            return index, weights, scores.mean() if self.training else None
        return index, weights


class DeepseekLike(nn.Module):
    """A gate that does it all, and an expert for all tokens."""

    def __init__(self, loss: bool = False) -> None:
        super().__init__()
        self.gate = GroupedGate(loss)
        self.experts = nn.ModuleList(NamedProjections() for _ in range(E))
        self.shared_experts = NamedProjections(H, 2 * I)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        index, weights, *_ = self.gate(hidden_states)
        out = loop(self.experts, x_TH, index, weights)
        return out.view(hidden_states.shape) + self.shared_experts(hidden_states)


class FirstOf(nn.Module):
    """What the block returns first, for Llama's layers, which expect one tensor."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor) -> Tensor:
        out = self.block(hidden_states)
        return out[0] if isinstance(out, tuple) else out


class OldConfig(LlamaConfig):
    @classmethod
    def small(cls) -> "OldConfig":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
        tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return cls(hidden_size=H, max_position_embeddings=128, **heads, **tokens)


class OldModel(LlamaForCausalLM):
    _block: type[nn.Module]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = FirstOf(self._block())
        self.post_init()


def _register(name: str, block: type[nn.Module]) -> type[OldConfig]:
    config = type(f"{block.__name__}Config", (OldConfig,), {"model_type": name, "__module__": __name__})
    model_names = {"config_class": config, "_block": block, "__module__": __name__}
    model = type(f"{block.__name__}ForCausalLM", (OldModel,), model_names)
    # found by name, as pickle does
    globals().update({config.__name__: config, model.__name__: model})
    AutoConfig.register(name, config)
    AutoModelForCausalLM.register(config, model)
    return config


CONFIGS = {block: _register(block.__name__.lower(), block) for block in (MixtralLike, Qwen2MoeLike, DeepseekLike)}
