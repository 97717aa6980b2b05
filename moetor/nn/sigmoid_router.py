"""The router of DeepSeek-V3 and the models after it.

Letters: E experts, K experts per token, H hidden size, G groups of experts.
"""

from typing import Unpack

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from .routers import Router, RouterOptions


class SigmoidTopKRouter(Router):
    """Sigmoid scores; a bias, and groups, say which are taken, and the scores alone what they count.

    DeepSeek-V3 and the models after it (GLM-4 MoE, Kimi-K2; MiniMax-M2 without groups). Experts
    lie in G groups of neighbours. A group's score is the sum of its two best experts' biased
    scores; the K experts come from the best `top_k_groups` groups.

    Attributes:
        e_score_correction_bias: (E,) buffer, fp32, zero at first; see `update_correction_bias`. Keep
            it in fp32 when the model is cast: steps of 0.001 vanish in bfloat16.

    Args:
        normalize: divide the K weights by their sum.
        scale: factor on the weights, after that; 2.5 in DeepSeek-V3.
        num_groups, top_k_groups: G, and how many of them a token may use; 8 and 4 in DeepSeek-V3.
        options: see `RouterOptions`; fp32_logits is on by default.

    Raises:
        InvalidInput: groups that do not divide the experts, or that hold too few.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.

    >>> router = SigmoidTopKRouter(hidden_size=4, num_experts=4, top_k=2, num_groups=2, top_k_groups=1)
    >>> logits = torch.tensor([[0.9, 0.1, 0.6, 0.6]]).logit()  # sums of the groups: 1.0, 1.2
    >>> router.choose(logits)
    (tensor([[2, 3]]), tensor([[0.5000, 0.5000]]))
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_k_groups: int = 1,
        **options: Unpack[RouterOptions],
    ) -> None:
        options.setdefault("fp32_logits", True)
        super().__init__(hidden_size, num_experts, top_k, **options)
        if not 1 <= top_k_groups <= num_groups or num_experts % num_groups:
            raise InvalidInput(
                f"a router needs groups of equal size, and top_k_groups in [1, num_groups], got {num_experts} experts,"
                f" num_groups = {num_groups}, top_k_groups = {top_k_groups}"
            )
        group_size = num_experts // num_groups
        if (num_groups > 1 and group_size < 2) or top_k > top_k_groups * group_size:
            raise InvalidInput(
                "a router needs groups of at least two experts, and at least top_k in those that a token may use, got"
                f" groups of {group_size}, top_k_groups = {top_k_groups}, top_k = {top_k}"
            )
        self.normalize, self.scale = normalize, scale
        self.num_groups, self.top_k_groups = num_groups, top_k_groups
        bias = torch.zeros(num_experts, device=options.get("device"), dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        if self.num_groups > 1:
            biased = biased.masked_fill(~self._in_best_groups(biased), -torch.inf)
        index = biased.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, index)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be zero
        return index, weights * self.scale

    def _in_best_groups(self, biased: Tensor) -> Tensor:
        """(…, E) bool."""
        of_group = biased.unflatten(-1, (self.num_groups, -1)).topk(2, dim=-1).values.sum(-1)
        best = of_group.topk(self.top_k_groups, dim=-1).indices
        is_best = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, best, True)
        return is_best.repeat_interleave(self.num_experts // self.num_groups, dim=-1)

    @torch.no_grad()
    def update_correction_bias(self, tokens_per_expert: Tensor, rate: float = 1e-3) -> None:
        """Make experts with fewer tokens than the mean a little likelier to be taken, the others less.

        To be called once a training step, in place of a loss that balances the experts.

        Args:
            tokens_per_expert: (E,), of the whole batch (over all ranks and micro-batches); see
                `moetor.nn.tokens_per_expert`.
            rate: of change; 0.001 for most of DeepSeek-V3's training.

        Source: Wang et al., arXiv:2408.15664, algorithm 1.

        >>> router = SigmoidTopKRouter(hidden_size=4, num_experts=3, top_k=1)
        >>> router.update_correction_bias(torch.tensor([6, 3, 0]), rate=0.5)
        >>> router.e_score_correction_bias.tolist()
        [-0.5, 0.0, 0.5]
        """
        load = tokens_per_expert.to(self.e_score_correction_bias)
        self.e_score_correction_bias += rate * (load.mean() - load).sign()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in `Router`, and no correction."""
        super().reset_parameters()
        if "e_score_correction_bias" in self._buffers:  # not yet while Router.__init__ runs
            self.e_score_correction_bias.zero_()

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"normalize={self.normalize}, scale={self.scale}"]
        parts += [f"num_groups={self.num_groups}, top_k_groups={self.top_k_groups}"] if self.num_groups > 1 else []
        return ", ".join(parts)
