"""One file a backend; all of them registered here, in the order of tables."""

from ..core.interface import ExpertsInterface
from . import auto, batched_mm, deepgemm, deepgemm_megamoe, eager, fused, grouped_mm, sonicmoe

for _module in (auto, eager, batched_mm, grouped_mm, fused, deepgemm, deepgemm_megamoe, sonicmoe):
    ExpertsInterface.register(_module.BACKEND.name, _module.BACKEND)
