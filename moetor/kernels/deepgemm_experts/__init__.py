"""A layer of experts around DeepGEMM's two grouped products: everything but the products is ours.

Letters: T tokens, K experts per token, S = T·K pairs, E experts, H hidden size, I intermediate
size; M padded rows: each expert's begin at a multiple of the library's alignment, 128, and M is the
most that any routing of S pairs needs, so that nothing waits for the host. Rows between an expert's
last and the next expert's first are never written, never read, and marked as nobody's.
"""

from .op import deepgemm_experts, prepare_powers

__all__ = ["deepgemm_experts", "prepare_powers"]
