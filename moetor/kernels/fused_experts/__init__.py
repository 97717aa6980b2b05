"""A whole layer of experts: route, product and gate, product and weight, add.

Two or three launches for a few tokens, four or seven for more.

Letters: T tokens, K experts per token, S = T·K pairs, E experts, H hidden size, I intermediate
size. Inference only. Weights are read where they lie, through their strides.
"""

from .op import fused_experts

__all__ = ["fused_experts"]
