"""Where the calls of a module run: weights that accelerate offloads are on no device between them."""

from typing import Any

import torch
from torch import nn


def execution_device(module: nn.Module, device: torch.device) -> torch.device:
    """The device that accelerate brings the module's weights to for a call; else `device`, where they are now."""
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):  # one hook or a sequence of them
        target = getattr(part, "execution_device", None)
        if device.type == "meta" and target is not None:
            return torch.device(target)
    return device
