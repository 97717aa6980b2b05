"""Modules of models as ExpertWeights: where the differences between models end. `adapter.py` is the page to read.

| file | which modules | seam |
|---|---|---|
| `decorated` | all experts that transformers runs through its experts interface | transformers' own |
| `undecorated` | the same layout without the decorator: step3p7 | `forward` |
| `longcat_flash` | experts that do nothing, by ids from E onward | `forward` |
| `dbrx` | flat weights, gate and up apart | `forward` |
| `two_modules` | one module a product: jetmoe (the block), aria of older releases | `forward` |
| `llama4` | the input is scaled: the block | `forward` |
| `switch` | MLPs in a ModuleDict, chosen by a mask | `forward` |
| `listed` | blocks that loop over a ModuleList of MLPs | `forward` |
| `refused` | known not to be readable, with the reason | none |
"""

from . import dbrx, decorated, listed, llama4, longcat_flash, refused, switch, two_modules, undecorated
from .adapter import (
    ADAPTER_KEY,
    FACTS_KEY,
    Adapter,
    adapter_of,
    experts_of,
    facts_of,
    is_experts,
    register_adapter,
    unregister_adapter,
)
from .decorated import Facts, is_decorated
from .seam import SEAM, install, runner_of
from .trial import Sizes, example_block, example_call, example_rows

__all__ = [
    "ADAPTER_KEY",
    "FACTS_KEY",
    "SEAM",
    "Adapter",
    "Facts",
    "Sizes",
    "adapter_of",
    "example_block",
    "example_call",
    "example_rows",
    "experts_of",
    "facts_of",
    "install",
    "is_decorated",
    "is_experts",
    "register_adapter",
    "runner_of",
    "unregister_adapter",
]

# The last is asked first: what is told by its class before what is told by its parts.
for _adapter in (
    listed.ADAPTER,
    undecorated.ADAPTER,
    longcat_flash.ADAPTER,
    dbrx.ADAPTER,
    two_modules.JETMOE,
    two_modules.ARIA,
    llama4.ADAPTER,
    switch.ADAPTER,
    decorated.ADAPTER,
    refused.ADAPTER,
):
    register_adapter(_adapter)
