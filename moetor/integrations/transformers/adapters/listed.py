"""Blocks that loop over a ModuleList of MLPs: Mixtral, Qwen2-MoE and DeepSeek as they were, and code from the hub.

The block is what is replaced: its gate, the rule by which it chooses, its experts, and what it adds
for all tokens. Nothing of it is known by name but `experts` and `gate`; every way to put its parts
together is tried.

Called with hidden_states (B, S, H); returns that shape, and the gate's logits if the block does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....core.errors import InvalidInput
from ....core.weights import ExpertWeights
from .adapter import Adapter, Run
from .mlp import Mlp, linears_of, outside_of_graphs, read_mlp, weights_of
from .routing_rules import RULES, from_gate
from .trial import Trial, example_block

_GATES = ("gate", "router")
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "k")
# Parts that all tokens go through, and the Linear that weights them by its sigmoid, if any.
_SHARED = ("shared_experts", "shared_expert")
_SHARED_GATE = "shared_expert_gate"


@dataclass(frozen=True, slots=True)
class Facts:
    """One way to put a block's parts together.

    Attributes:
        rule: of `RULES`, for a gate that gives logits; None: the gate chooses by itself.
        top_k: name of the attribute that holds K, for a rule.
        shared: name of the part that is added for all tokens.
        returns_logits: beside the result, as (T, E).
        trains: whether the block does the same in training.
    """

    mlp: Mlp
    gate: str
    rule: str | None
    top_k: str | None
    shared: str | None
    returns_logits: bool
    trains: bool = False


def recognises(module: nn.Module) -> bool:
    return isinstance(module._modules.get("experts"), nn.ModuleList)


def read(block: nn.Module) -> Iterator[Facts]:
    who = type(block).__name__
    try:
        mlp = read_mlp(list(block._modules["experts"]._modules.values()))  # type: ignore[union-attr]
    except InvalidInput as error:
        raise InvalidInput(f"{who} cannot be run by moetor: {error}") from None
    parts = {name for name, child in block.named_children() if any(True for _ in child.parameters())} - {"experts"}
    gate = next((name for name in _GATES if name in parts), None)
    if gate is None:
        raise InvalidInput(
            f"{who} cannot be run by moetor: it has no gate, only {', '.join(sorted(parts)) or 'experts'}"
        )
    shared = next((name for name in _SHARED if name in parts), None)
    if unknown := parts - {gate, shared, _SHARED_GATE} | {name for name, _ in block.named_parameters(recurse=False)}:
        raise InvalidInput(f"{who} cannot be run by moetor: it has parts of unknown use: {', '.join(sorted(unknown))}")
    ways: list[tuple[str | None, str | None]] = [
        (rule, name) for name in _TOP_K if type(getattr(block, name, None)) is int for rule in RULES
    ]
    trial = Trial(ADAPTER, block)
    for rule, top_k in [*ways, (None, None)]:
        for returns_logits in (True, False) if rule else (False,):
            facts = Facts(mlp, gate, rule, top_k, shared, returns_logits, trains=True)
            if trial.agrees(facts):
                yield replace(facts, trains=trial.agrees(facts, training=True))
                return
    raise InvalidInput(f"{who} cannot be run by moetor: it puts its parts together in a way of its own ({trial})")


def weights(block: Any, facts: Facts) -> ExpertWeights:
    return weights_of(list(block.experts._modules.values()), facts.mlp)


@outside_of_graphs
def forward(block: Any, facts: Facts, run: Run, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    if block.training and not facts.trains:
        raise InvalidInput(
            f"{type(block).__name__} computes something else in training, noise or a loss of its own, which moetor"
            " does not; call model.eval(), or train the model without moetor"
        )
    x_TH, gate = hidden_states.reshape(-1, hidden_states.shape[-1]), getattr(block, facts.gate)
    if facts.rule is None:
        logits_TE = None
        index_TK, weights_TK = from_gate(type(block).__name__, gate(hidden_states))
    else:
        logits_TE = gate(x_TH)
        index_TK, weights_TK = RULES[facts.rule](logits_TE, getattr(block, facts.top_k or ""))
    out = run(x_TH, index_TK, weights_TK)
    if facts.shared is not None:
        shared = getattr(block, facts.shared)(x_TH)
        if _SHARED_GATE in block._modules:
            shared = torch.sigmoid(block.shared_expert_gate(x_TH)) * shared
        out = out + shared
    out = out.view(hidden_states.shape)
    return (out, logits_TE) if facts.returns_logits and logits_TE is not None else out


def holders(block: Any, facts: Facts) -> Iterable[nn.Module]:
    return linears_of(list(block.experts._modules.values()), facts.mlp)


ADAPTER = Adapter("listed", recognises, read, weights, forward, example_block, holders)
