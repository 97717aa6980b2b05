"""Memory that a group of processes shares for one kernel: made once, kept until it is freed on purpose.

A buffer that a captured CUDA graph wrote into must outlive it, so one that was outgrown is kept as well.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...core.errors import BackendRefused

_logger = logging.getLogger("moetor")
# Tokens of the first buffer: what decoding needs, and small beside the weights.
SMALLEST = 512


@dataclass(slots=True)
class _Buffer:
    num_tokens: int
    memory: Any


# Newest last, by everything but the number of tokens.
_buffers: dict[tuple[Any, ...], list[_Buffer]] = {}
_own_group: list[dist.ProcessGroup] = []
_made_default = False


def buffer_for(key: tuple[Any, ...], num_tokens: int, make: Callable[[int], Any]) -> Any:
    """The buffer of this key for at least so many tokens; made, or made larger, outside of captures only.

    Args:
        key: all that its layout depends on besides.
        make: (tokens) -> the buffer.

    Raises:
        BackendRefused: it would have to be made while a CUDA graph is captured.
    """
    kept = _buffers.setdefault(key, [])
    if kept and kept[-1].num_tokens >= num_tokens:
        return kept[-1].memory
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise BackendRefused(
            f"a shared buffer for {num_tokens} tokens cannot be made while a CUDA graph is captured;"
            " run a call of this size before"
        )
    size = max(SMALLEST, 1 << (num_tokens - 1).bit_length())  # few sizes, each kept
    kept.append(_Buffer(size, make(size)))
    return kept[-1].memory


def group_of_one(device: torch.device) -> dist.ProcessGroup:
    """A process group of this process alone; torch.distributed is initialised for it, if nobody has."""
    global _made_default
    if not dist.is_initialized():
        _logger.info("initialising torch.distributed with one process, for buffers that its kernels share")
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        _made_default = True
    if not _own_group:
        world = dist.group.WORLD
        assert world is not None
        alone = dist.get_world_size() == 1
        _own_group.append(world if alone else dist.new_group([dist.get_rank()], use_local_synchronization=True))
    return _own_group[0]


def free_buffers() -> None:
    """Free them all, and leave torch.distributed if it was initialised for them. Graphs that used them are dead."""
    global _made_default
    for kept in _buffers.values():
        for buffer in kept:
            buffer.memory.destroy()
    _buffers.clear()
    _own_group.clear()
    if _made_default:
        dist.destroy_process_group()
        _made_default = False
