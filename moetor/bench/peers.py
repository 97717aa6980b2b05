"""Who can run a draw: every backend of ours, and other projects' own code on the same tensors.

A candidate says why it cannot run a draw, in words for the table, before anything is tried.
Letters: T tokens, K experts per token, S = T·K pairs, E experts, H hidden size, I intermediate size.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.cost import bytes_per_expert
from ..core.errors import unknown_name
from ..core.interface import ExpertsInterface, describe_call
from ..core.weights import ExpertWeights
from ..forward import experts_forward
from .cases import Draw

# Above this a copy of a weight stack per pair takes seconds and shows nothing new.
GATHERED_BYTES = 8 * 2**30
_COUNTS_ON_HOST = "reads counts on the host, which a CUDA graph cannot capture"


@dataclass(frozen=True, slots=True)
class Bound:
    """A function and what it is called with to run a draw: what torch.compile gets, and its arguments.

    Attributes:
        fn: the same object for every draw of a candidate, so that it is compiled once.
    """

    fn: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def __call__(self) -> Tensor:
        return self.fn(*self.arguments)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a draw.

    Attributes:
        name: ours as users write them; "transformers:eager" and the like; other projects' names.
        why_not: (draw, mode) -> why it cannot, or None; modes are those of `samplers.MODES`.
        bind: (draw) -> what runs it; may be slow, is not timed.
        peer: whether it is somebody else's.
    """

    name: str
    why_not: Callable[[Draw, str], str | None]
    bind: Callable[[Draw], Bound]
    peer: bool = True


def candidates(names: str = "all") -> list[Candidate]:
    """Candidates by name; "ours", "transformers", "peers" and "all" are groups."""
    ours = [_ours(name) for name in ExpertsInterface.names()]
    hf = [_transformers(name) for name in ("grouped_mm", "batched_mm", "eager")]
    theirs = [*hf, _LIGER]
    known = {candidate.name: candidate for candidate in (*ours, *theirs)}
    groups = {"ours": ours, "transformers": hf, "peers": theirs, "all": [*ours, *theirs]}
    chosen: dict[str, Candidate] = {}
    for name in (part.strip() for part in names.split(",") if part.strip()):
        if name not in groups and name not in known:
            raise unknown_name("candidate", name, [*groups, *known])
        for candidate in groups.get(name) or [known[name]]:
            chosen.setdefault(candidate.name, candidate)
    return list(chosen.values())


def _too_much_to_gather(draw: Draw) -> str | None:
    size = draw.top_k_index.numel() * bytes_per_expert(draw.weights)
    if size <= GATHERED_BYTES:
        return None
    return f"would copy {size / 2**30:.0f} GiB of weights, more than the bench's {GATHERED_BYTES / 2**30:.0f}"


def _ours(name: str) -> Candidate:
    def why_not(draw: Draw, mode: str) -> str | None:
        x, ids, routing = draw.hidden_states, draw.top_k_index, draw.top_k_weights
        with torch.set_grad_enabled(draw.cell.training):
            call = describe_call(draw.weights, x, ids, routing)
        # what reduce-overhead compiles goes into a CUDA graph
        compiling = mode not in ("call", "graph")
        call = replace(call, capturing=mode in ("graph", "reduce-overhead"), compiling=compiling)
        reason = ExpertsInterface[name].refusal(draw.weights, call)
        return reason or (_too_much_to_gather(draw) if name == "batched_mm" else None)

    def forward(weights: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts_forward(weights, x, ids, routing, backend=name)

    def bind(draw: Draw) -> Bound:
        return Bound(forward, (draw.weights, draw.hidden_states, draw.top_k_index, draw.top_k_weights))

    return Candidate(name, why_not, bind, peer=False)


def _transformers(implementation: str) -> Candidate:
    def why_not(draw: Draw, mode: str) -> str | None:
        cell = draw.cell
        if cell.format != "dense":
            return "transformers keeps quantised experts in other modules, which the bench does not build"
        if not cell.shape.plain and not _is_gpt_oss(draw):
            return "no experts module of transformers has this gate and storage"
        # torch's grouped product is one kernel for bfloat16 only, and else a loop on the host
        loops = implementation == "eager" or (implementation == "grouped_mm" and cell.dtype != torch.bfloat16)
        if mode == "graph" and loops:
            return _COUNTS_ON_HOST
        return _too_much_to_gather(draw) if implementation == "batched_mm" else None

    def forward(module: torch.nn.Module, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        out: Tensor = module(x, ids, routing)
        return out

    def bind(draw: Draw) -> Bound:
        module = _experts_module(draw, implementation)
        return Bound(forward, (module, draw.hidden_states, draw.top_k_index, draw.top_k_weights))

    return Candidate(f"transformers:{implementation}", why_not, bind)


def _is_gpt_oss(draw: Draw) -> bool:
    shape = draw.cell.shape
    return shape.gate == "gpt_oss" and shape.bias and shape.interleaved and shape.transposed


def _experts_module(draw: Draw, implementation: str) -> torch.nn.Module:
    """An experts module of transformers that holds the draw's own tensors."""
    from transformers import PreTrainedConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    shape, gpt_oss = draw.cell.shape, _is_gpt_oss(draw)
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "hidden_act": "silu",
        **dict.fromkeys(("num_experts", "num_local_experts"), shape.experts),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), shape.intermediate),
        "swiglu_alpha": shape.activation.alpha,
        "swiglu_limit": shape.activation.limit,
    }
    config = PreTrainedConfig(**settings)
    config._experts_implementation_internal = implementation
    with torch.device("meta"):
        module: Any = (GptOssExperts if gpt_oss else Qwen3MoeExperts)(config)
    (up,), down = draw.weights.ups, draw.weights.down
    tensors = {"gate_up_proj": up.first, "down_proj": down.first}
    biases = {"gate_up_proj_bias": up.bias_EN(), "down_proj_bias": down.bias_EN()}
    tensors |= {name: bias for name, bias in biases.items() if bias is not None}
    if gpt_oss:
        # older releases have these in the class
        module.alpha, module.limit = shape.activation.alpha, shape.activation.limit
    for name, tensor in tensors.items():
        parameter = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, False)
        setattr(module, name, parameter)
    return module.eval()  # type: ignore[no-any-return]


def _liger_why_not(draw: Draw, mode: str) -> str | None:
    device = draw.hidden_states.device
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if importlib.util.find_spec("liger_kernel") is None:
        return "needs the package liger_kernel"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "needs compute capability 8.0 or newer"
    if mode == "graph":
        return _COUNTS_ON_HOST
    if mode != "call":
        return "is not compiled by torch.compile here"
    plain = draw.cell.shape.plain and draw.cell.format == "dense"
    return None if plain else "knows only dense silu(gate) · up, concatenated, without biases"


def _liger_bind(draw: Draw) -> Bound:
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    up, down = draw.weights.all

    def call() -> Tensor:
        # int32 as in LigerExperts.forward
        ids = draw.top_k_index.to(torch.int32)
        out: Tensor = function.apply(draw.hidden_states, up.first, down.first, ids, draw.top_k_weights)
        return out

    return Bound(call, ())


_LIGER = Candidate("liger", _liger_why_not, _liger_bind)
