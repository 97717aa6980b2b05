"""How many experts a token gets, as configs tell it; no experts module does."""

from typing import Any

_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "top_k")


def top_k_of(config: Any) -> int:
    """K by the names that configs have for it; 1 if it has none of them.

    >>> from types import SimpleNamespace
    >>> top_k_of(SimpleNamespace(num_experts_per_tok=8))
    8
    """
    for name in _NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1
