"""A whole layer of experts: route, product and gate, product and weight, add; forward and backward.

Two or three launches for a few tokens, four or seven for more; backward, nine more than those of the
grouping.

Letters: T tokens, K experts per token, S = T·K pairs, E experts, H hidden size, I intermediate
size. Weights are read where they lie, through their strides, and their gradients are laid out likewise.
"""

from .op import fused_experts

__all__ = ["fused_experts"]
