"""FP8 and FP4: what the bytes of a format mean, and how dense experts become such bytes.

>>> import torch
>>> from moetor import ExpertWeights, Weight
>>> dense = ExpertWeights(Weight(torch.ones(4, 512, 128)), Weight(torch.ones(4, 128, 256)))
>>> quantized = quantize_experts(dense, "fp8")
>>> quantized.up.data.dtype, quantized.up.scale.shape, quantized.dtype == quantized.down.data.dtype
(torch.float8_e4m3fn, torch.Size([4, 4, 1]), True)
"""

from .activations import round_activations
from .config import FineGrainedFP8Config
from .experts import dequantize_experts, quantize_experts, split_gate_up, weight_of_blocks
from .linear import compute_dtype, frozen_why_not, quantized_product
from .matrices import dequantize, quantize
from .products import gathered_product, grouped_product

__all__ = [
    "FineGrainedFP8Config",
    "compute_dtype",
    "dequantize",
    "dequantize_experts",
    "frozen_why_not",
    "gathered_product",
    "grouped_product",
    "quantize",
    "quantize_experts",
    "quantized_product",
    "round_activations",
    "split_gate_up",
    "weight_of_blocks",
]
