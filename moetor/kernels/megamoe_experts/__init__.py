"""A layer of experts in one kernel of DeepGEMM's, Mega MoE: dispatch, both products, gate and sum; FP8 on SM90.

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

from .op import megamoe_experts, prepare_fp8

__all__ = ["megamoe_experts", "prepare_fp8"]
