"""Experts that moetor must not touch, with the reason: packed weights of other libraries, and other arithmetic.

Packed bytes look like weights of another shape or dtype. Linears and tensors of other libraries
inside a layout that moetor knows are found where they are read (`tensors.py`, `mlp.py`).
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ....core.errors import InvalidInput
from ....core.weights import ExpertWeights
from .adapter import Adapter
from .names import is_a

_PACKED = "holds {} of its own kernels, which moetor does not read; {}"
REASONS = {
    "Mxfp4GptOssExperts": _PACKED.format(
        "MXFP4 blocks in the layout", "load with quantization_config=Mxfp4Config(dequantize=True)"
    ),
    "FP8Experts": _PACKED.format(
        "FP8 weights in the layout", "load with quantization_config=FineGrainedFP8Config(dequantize=True)"
    ),
    "GgufExperts": _PACKED.format("GGUF blocks in the layout", "load with GgufConfig(dequantize=True)"),
    "NllbMoeExperts": "reads a mask of the chosen experts as if it were their ids, which moetor does not imitate",
    "DogeCDMoE": "looks up single neurons in embeddings, which is another arithmetic than that of experts",
}


recognises = is_a(*REASONS)


def read(module: nn.Module) -> Iterator[Any]:
    reason = next(reason for name, reason in REASONS.items() if is_a(name)(module))
    raise InvalidInput(f"{type(module).__name__} {reason}")


def weights(module: nn.Module, facts: Any) -> ExpertWeights:
    raise AssertionError("it has no facts")


ADAPTER = Adapter("refused", recognises, read, weights)
