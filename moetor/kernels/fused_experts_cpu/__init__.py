"""A whole layer of experts on the CPU, forward and backward: sort, then per expert product, gate, product; add.

Letters: T tokens, K experts per token, S = T·K pairs, E experts, H hidden size, I intermediate
size, N and K output and input size of one matrix, m rows of one expert. Weights are read where
they lie, and only those of experts that have rows.
"""

from .op import fused_experts
from .products import describe

__all__ = ["describe", "fused_experts"]
