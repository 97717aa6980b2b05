"""The tensors of a cell: layers of weights, and calls on them whose experts are not in the cache.

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.cost import bytes_per_expert, experts_hit
from ..core.errors import InvalidInput
from ..core.weights import ExpertWeights, Weight
from ..quantization import quantize_experts
from .shapes import Shape

ROUTINGS = ("uniform", "zipf", "one_expert")
# What the layers of a cell may take; one layer is made in any case.
WEIGHT_BYTES = 16 * 2**30
MOST_LAYERS = 16
ZIPF = 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a sweep, from data alone.

    Attributes:
        tokens: T.
        routing: "uniform": K distinct experts at random; "zipf": the same, the r-th most liked
            expert with probability ~ 1/r; "one_expert": every token has the same first expert.
        format: of the weights, a key of `core.formats.FORMATS`.
        training: whether a call is forward and backward, with gradients of all that may have one.
    """

    shape: Shape
    tokens: int
    dtype: torch.dtype
    routing: str = "uniform"
    format: str = "dense"
    training: bool = False
    seed: int = 0

    def __str__(self) -> str:
        words = [self.shape.name, f"T={self.tokens}", str(self.dtype).removeprefix("torch."), self.routing]
        words += [self.format] * (self.format != "dense") + ["training"] * self.training
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Draw:
    """The tensors of one call; several draws share a layer's weights.

    Attributes:
        upstream: (T, H), the gradient of the result, for training.
    """

    cell: Cell
    weights: ExpertWeights
    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    upstream: Tensor | None = None

    @property
    def hit(self) -> int:
        """Experts with at least one token."""
        return int(self.top_k_index.unique().numel())

    def leaves(self) -> list[Tensor]:
        """What gets a gradient: hidden_states, top_k_weights, then the layer's tensors; nothing in inference."""
        tensors = [self.hidden_states, self.top_k_weights, *self.weights.tensors()]
        return [tensor for tensor in tensors if tensor.requires_grad]


def make_draws(cell: Cell, device: torch.device) -> list[Draw]:
    """Calls to be run in turn, each on other experts than the one before, so that weights come from memory.

    At T = 1 the experts that one token hits nearly fit a GPU's cache. Draws go round among as many
    layers as it takes for their experts to fill the cache four times, or as the memory bound allows.
    """
    if cell.routing not in ROUTINGS:
        raise InvalidInput(f"unknown routing {cell.routing!r}; known: {', '.join(ROUTINGS)}")
    key = f"{cell}|{cell.seed}".encode()
    generator = torch.Generator(device).manual_seed(zlib.crc32(key))
    layers = [_layer(cell, generator)]
    while len(layers) < num_layers(cell, layers[0]):
        layers.append(_layer(cell, generator))
    # Many where a call is short, so that the way into and out of a pass is little of it; long calls
    # stream through the cache anyway.
    few = 8 if cell.tokens <= 64 else 4 if cell.tokens < 4096 else 2
    num_draws = max(len(layers), few) if device.type == "cuda" and not cell.training else 2
    return [_draw(cell, layers[i % len(layers)], generator) for i in range(num_draws)]


def num_layers(cell: Cell, layer: ExpertWeights) -> int:
    """Layers that a cell rotates among, at least one; see `make_draws`."""
    # a backward pass reads and writes far more than a cache holds
    if cell.tokens >= 4096 or cell.training:
        return 1
    hit_bytes = experts_hit(cell.tokens, cell.shape.top_k, cell.shape.experts) * bytes_per_expert(layer)
    layer_bytes = cell.shape.experts * bytes_per_expert(layer)
    free, cache = WEIGHT_BYTES, 2**25
    if layer.device.type == "cuda":
        cache = torch.cuda.get_device_properties(layer.device).L2_cache_size
        free = min(free, torch.cuda.mem_get_info(layer.device)[0] // 4)
    wanted = min(max(math.ceil(4 * cache / hit_bytes), 2), MOST_LAYERS)
    # the first one is made already and is no longer part of what is free
    return max(1, min(wanted, 1 + int(free // layer_bytes)))


def _layer(cell: Cell, generator: torch.Generator) -> ExpertWeights:
    weights = make_weights(cell.shape, cell.dtype, generator)
    if cell.format != "dense":
        return quantize_experts(weights, cell.format)  # which nobody trains
    # parameters, so that a module of somebody else can hold the same tensors
    return weights.map(torch.nn.Parameter) if cell.training else weights


def make_weights(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> ExpertWeights:
    """One layer with normal weights, in the model's own storage.

    Where the gate clamps, its inputs are spread so far that the clamp is seen: a result without it is wrong.
    """
    E, H, I = shape.experts, shape.hidden, shape.intermediate
    spread = 1.0 if shape.activation.limit is None else shape.activation.limit / 2

    def normal(*sizes: int, scale: float) -> Tensor:
        empty = torch.empty(*sizes, dtype=dtype, device=generator.device)
        return empty.normal_(0, scale, generator=generator)

    def stack(rows: int, columns: int, scale: float) -> Weight:
        sizes = (E, columns, rows) if shape.transposed else (E, rows, columns)
        bias = normal(E, rows, scale=0.3) if shape.bias else None
        return Weight(normal(*sizes, scale=scale), bias, transposed=shape.transposed)

    return ExpertWeights(
        stack(2 * I, H, spread * H**-0.5),
        stack(H, I, I**-0.5),
        activation=shape.activation,
        interleaved=shape.interleaved,
    )


def _draw(cell: Cell, layer: ExpertWeights, generator: torch.Generator) -> Draw:
    T, K, H, device = cell.tokens, cell.shape.top_k, cell.shape.hidden, generator.device
    x = torch.empty(T, H, dtype=cell.dtype, device=device).normal_(generator=generator)
    routing = torch.rand(T, K, device=device, generator=generator) + 0.1
    routing = routing / routing.sum(-1, keepdim=True)
    if not cell.shape.fp32_routing:
        routing = routing.to(cell.dtype)
    ids = make_ids(cell, generator)
    if not cell.training:
        return Draw(cell, layer, x, ids, routing)
    upstream = torch.empty_like(x).normal_(generator=generator)
    return Draw(cell, layer, x.requires_grad_(), ids, routing.requires_grad_(), upstream)


def make_ids(cell: Cell, generator: torch.Generator) -> Tensor:
    """(T, K) int64, K distinct experts a token; see `Cell.routing`."""
    T, K, E, device = cell.tokens, cell.shape.top_k, cell.shape.experts, generator.device
    noise = torch.rand(T, E, device=device, generator=generator).clamp_(1e-7, 1 - 1e-7)
    if cell.routing == "zipf":
        # Gumbel noise on log-probabilities: the K largest are a draw without replacement
        rank = torch.randperm(E, device=device, generator=generator) + 1
        noise = -torch.log(-torch.log(noise)) - ZIPF * torch.log(rank.to(noise.dtype))
    if cell.routing == "one_expert":
        noise[:, int(torch.randint(E, (1,), device=device, generator=generator))] = 2.0
    return noise.topk(K, dim=-1).indices
