"""Autocast, asked and switched off."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_enabled(device_type: str) -> bool:
    """Whether torch.autocast is on for this kind of device; never for meta tensors, which have none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Switch autocast off, if it is on: a dtype that was chosen is not to be changed again.

    A backward pass may run inside the user's block as well.
    """
    return torch.autocast(device_type, enabled=False) if autocast_enabled(device_type) else nullcontext()
