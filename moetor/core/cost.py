"""What one call costs, from shapes alone, and the least time a machine could take for it.

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size. Routing is
taken as uniform and independent unless the number of experts hit is given.
"""

from dataclasses import dataclass

from .formats import FORMATS
from .weights import ExpertWeights


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one forward call.

    Attributes:
        flops: multiplications and additions of the products.
        weight_bytes: weights of the experts that were hit, read once.
        activation_bytes: hidden_states read, intermediate rows written and read, result written.
    """

    flops: float
    weight_bytes: float
    activation_bytes: float

    def floor_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The larger of memory time and arithmetic time, µs; launches are not counted."""
        memory = (self.weight_bytes + self.activation_bytes) / bytes_per_s
        return max(memory, self.flops / flops_per_s) * 1e6


def experts_hit(num_tokens: int, top_k: int, num_experts: int) -> float:
    """Expected number of experts with at least one token.

    >>> experts_hit(1, 2, 8), round(experts_hit(4, 2, 8), 2)
    (2.0, 5.47)
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def bytes_per_expert(weights: ExpertWeights) -> float:
    """Bytes of one expert's weights, without scales.

    >>> import torch
    >>> from moetor.core.weights import Weight
    >>> bytes_per_expert(ExpertWeights(Weight(torch.ones(4, 6, 5)), Weight(torch.ones(4, 5, 3))))
    180.0
    """
    return sum(
        weight.out_features * weight.in_features * (FORMATS[weight.format].bits or weight.first.element_size() * 8) / 8
        for weight in weights.all
    )


def cost(weights: ExpertWeights, num_tokens: int, top_k: int, hit: float | None = None) -> Cost:
    """The cost of a call of T tokens.

    Args:
        hit: experts with at least one token; None: its expectation.
    """
    T, H, I = num_tokens, weights.hidden_size, weights.intermediate_size
    pairs = T * top_k
    element = 2 if weights.quantized else weights.down.first.element_size()
    columns = sum(up.out_features for up in weights.ups)
    if hit is None:
        hit = experts_hit(T, top_k, weights.num_experts)
    return Cost(
        flops=2.0 * pairs * H * (columns + I),
        weight_bytes=hit * bytes_per_expert(weights),
        activation_bytes=(2.0 * T * H + 2.0 * pairs * I) * element,
    )
