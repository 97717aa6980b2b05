"""A class known by its name, wherever it is defined: in transformers, or in a copy of its code."""

import functools
from collections.abc import Callable

from torch import nn


def is_a(*names: str) -> Callable[[nn.Module], bool]:
    """Whether a module is of a class of one of these names, or derived from one, as a parametrized one is."""
    wanted = frozenset(names)

    def recognises(module: nn.Module) -> bool:
        return not wanted.isdisjoint(_names_of(type(module).__mro__))

    return recognises


@functools.lru_cache(maxsize=4096)
def _names_of(classes: tuple[type, ...]) -> frozenset[str]:
    return frozenset(cls.__name__ for cls in classes)
