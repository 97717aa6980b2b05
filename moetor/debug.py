"""Checks that cost time, for hunting a bug: wrong expert ids above all.

`MOETOR_DEBUG=1` in the environment switches them on for a whole process.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .core.errors import InvalidInput
from .kernels.library import define

_ALWAYS = os.environ.get("MOETOR_DEBUG", "0") not in ("", "0")
_local = threading.local()


@contextmanager
def check_routing() -> Iterator[None]:
    """Inside, an id that is neither an expert nor a sentinel (-1 or E) is an error; this thread only.

    Outside such an id adds nothing, as a sentinel does. Costs a host sync a call. A compiled
    function is compiled once more for calls inside, where its graph checks as well; a program that
    is exported inside checks wherever it runs. In a CUDA graph that is captured inside, a wrong id
    is an assertion of the device, which no later call of the process survives.
    """
    before = getattr(_local, "checking", False)
    _local.checking = True
    try:
        yield
    finally:
        _local.checking = before


def checking() -> bool:
    """Whether ids are checked in this thread."""
    return _ALWAYS or getattr(_local, "checking", False)


def checked_ids(top_k_index: Tensor, num_experts: int) -> Tensor:
    """The same ids (T, K), or InvalidInput if one lies outside [-1, num_experts].

    The caller goes on with the result: what is compiled would leave out a check that nobody reads.

    >>> checked_ids(torch.tensor([[1, -1]]), num_experts=2)
    tensor([[ 1, -1]])
    """
    ids: Tensor = torch.ops.moetor.checked_ids(top_k_index, num_experts)
    return ids


def _checked_ids(ids_TK: Tensor, num_experts: int) -> Tensor:
    wrong = (ids_TK < -1) | (ids_TK > num_experts)
    allowed = f"top_k_index needs ids in [0, {num_experts}), or -1 or {num_experts} for no expert"
    if ids_TK.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(~wrong.any(), allowed)
    elif wrong.any():
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise InvalidInput(
            f"{allowed}, got {int(ids_TK[token, slot])} at token {token}, slot {slot} ({int(wrong.sum())} such ids)"
        )
    return ids_TK.clone()  # an operator gives back no tensor that it was given


define(
    "checked_ids(Tensor ids, int num_experts) -> Tensor", _checked_ids, lambda ids, _: torch.empty_like(ids), syncs=True
)
