"""Checks that cost time, for hunting a bug: wrong expert ids above all.

`MOETOR_DEBUG=1` in the environment switches them on for a whole process.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .core.errors import InvalidInput

_ALWAYS = os.environ.get("MOETOR_DEBUG", "0") not in ("", "0")
_local = threading.local()


@contextmanager
def check_routing() -> Iterator[None]:
    """Inside, an id that is neither an expert nor a sentinel (-1 or E) is an error; this thread only.

    Outside such an id adds nothing, as a sentinel does, and so it does in what torch.compile has
    compiled, which cannot look at values. Costs a host sync a call.
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


def require_valid_ids(top_k_index: Tensor, num_experts: int) -> None:
    """Raise InvalidInput if an id lies outside [-1, num_experts]."""
    wrong = (top_k_index < -1) | (top_k_index > num_experts)
    if wrong.any():
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise InvalidInput(
            f"top_k_index needs ids in [0, {num_experts}), or -1 or {num_experts} for no expert,"
            f" got {int(top_k_index[token, slot])} at token {token}, slot {slot} ({int(wrong.sum())} such ids)"
        )
