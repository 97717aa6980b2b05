"""Routers: which experts each token goes to, and how much each of them counts.

Letters: E experts, K experts per token, H hidden size. A router keeps the leading sizes of what it
is given. Routing weights are fp32 (float64 for float64): experts apply them in fp32, so nothing is
gained by rounding them.
"""

import math
from typing import NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.autocast import without_autocast
from ..core.errors import InvalidInput


class Routing(NamedTuple):
    """What a router decides.

    Attributes:
        top_k_index: (…, K) int64.
        top_k_weights: (…, K).
        logits: (…, E), of the linear layer; losses that balance the experts read them.
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    logits: Tensor


class RouterOptions(TypedDict, total=False):
    """What every router takes by keyword.

    Attributes:
        bias: whether the linear layer has one; no by default.
        fp32_logits: run the linear layer in fp32 (float64 for float64), also inside autocast: half
            precision cannot tell near logits apart. No by default, but for SigmoidTopKRouter.
        device, dtype: of `weight` (E, H) and `bias` (E,).
    """

    bias: bool
    fp32_logits: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class Router(nn.Module):
    """A linear layer, and a choice among its E outputs that a subclass makes.

    Args:
        hidden_size, num_experts, top_k: H, E, K.
        options: see `RouterOptions`.

    Raises:
        InvalidInput: not 1 ≤ K ≤ E.
    """

    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, **options: Unpack[RouterOptions]) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise InvalidInput(f"a router needs top_k in [1, {num_experts}], the number of experts, got {top_k}")
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.fp32_logits = options.get("fp32_logits", False)
        device, dtype = options.get("device"), options.get("dtype")
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if options.get("bias") else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def forward(self, hidden_states: Tensor) -> Routing:
        """Route tokens (…, H)."""
        logits = self.logits(hidden_states)
        return Routing(*self.choose(logits.to(_at_least_fp32(logits.dtype))), logits)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(…, H) to (…, E)."""
        if not self.fp32_logits:
            return F.linear(hidden_states, self.weight, self.bias)
        dtype = _at_least_fp32(hidden_states.dtype)
        with without_autocast(hidden_states.device.type):
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(hidden_states.to(dtype), self.weight.to(dtype), bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (…, E) in fp32 or float64 to top_k_index and top_k_weights, (…, K)."""
        raise NotImplementedError(f"{type(self).__name__} must say how it chooses")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weight and bias as nn.Linear does, from U(-1/√H, 1/√H)."""
        bound = 1 / math.sqrt(self.hidden_size)
        for tensor in self.parameters():
            tensor.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}"


class SoftmaxTopKRouter(Router):
    """Softmax over all experts, then the K largest; with `normalize` divided by their sum.

    Qwen2-MoE and OLMoE do not normalise, Mixtral and Qwen3-MoE do.

    Source: Switch Transformer, arXiv:2101.03961, section 2.1, and Mixtral, arXiv:2401.04088, section 2.1.

    >>> router = SoftmaxTopKRouter(hidden_size=4, num_experts=3, top_k=2)
    >>> index, weights = router.choose(torch.tensor([[1.0, 6.0, 3.0]]).log())  # 6 and 3 out of 10
    >>> index, weights
    (tensor([[1, 2]]), tensor([[0.6000, 0.3000]]...))
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = False,
        **options: Unpack[RouterOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        self.normalize = normalize

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        return index, weights / weights.sum(-1, keepdim=True) if self.normalize else weights

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, normalize={self.normalize}"


class TopKSoftmaxRouter(Router):
    """The K largest logits, then softmax over those: gpt-oss (with `bias`), GraniteMoE.

    In exact arithmetic the same as SoftmaxTopKRouter with `normalize`.

    Source: Shazeer et al., arXiv:1701.06538, section 2.1, without its noise.

    >>> router = TopKSoftmaxRouter(hidden_size=4, num_experts=3, top_k=2)
    >>> index, weights = router.choose(torch.tensor([[1.0, 6.0, 3.0]]).log())  # 6 and 3 out of 9
    >>> index, weights
    (tensor([[1, 2]]), tensor([[0.6667, 0.3333]]...))
    """

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        largest, index = logits.topk(self.top_k, dim=-1)
        return index, largest.softmax(-1)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
