"""FP8 and FP4: what the bytes of a format mean, and how dense experts become such bytes.

>>> import torch
>>> from moetor.core.formats import FORMATS
>>> payload, scale = quantize(torch.ones(256, 256), FORMATS["fp8"])
>>> payload.shape, scale.shape, dequantize(payload, scale, FORMATS["fp8"])[0, 0]
(torch.Size([256, 256]), torch.Size([2, 2]), tensor(1.))
"""

from .activations import round_activations
from .matrices import dequantize, quantize

__all__ = ["dequantize", "quantize", "round_activations"]
