"""One file a backend; all of them registered here, in the order of tables."""

from ..core.interface import ExpertsInterface
from . import auto, batched_mm, eager, fused, grouped_mm

for _module in (auto, fused, grouped_mm, batched_mm, eager):
    ExpertsInterface.register(_module.BACKEND.name, _module.BACKEND)
