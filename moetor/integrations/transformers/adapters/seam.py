"""How a call of somebody's module arrives at moetor: through transformers' interface, or in place of `forward`.

Decorated experts call the function that their config names; a module gets a copy of its config that
names ours. Others have no such seam: the module gets a `forward` of its own, inside any hook that
accelerate has put around it (a hook keeps the forward that it found as `_old_forward`). Exchanging
the module's class instead is bypassed there in silence, and does not live with parametrizations.
"""

import copy
import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ....core.errors import InvalidInput
from . import decorated
from .adapter import ADAPTER_KEY, adapter_of, facts_of

SEAM = "moetor"


def install(module: nn.Module) -> None:
    """Send the module's calls to moetor.

    Raises:
        InvalidInput: somebody else has given the module a forward, which ours would bypass.
    """
    if decorated.is_decorated(module):
        config: Any = module.config
        if config._experts_implementation_internal != SEAM:
            # The module's own copy: the model's config, which others may share, is left as it is.
            own = copy.copy(config)
            own._experts_implementation_internal = SEAM
            module.config = own
        return
    place = "_old_forward" if "_hf_hook" in module.__dict__ else "forward"
    found = module.__dict__.get(place)
    if isinstance(found, Forward):
        return
    if found is not None and getattr(found, "__func__", None) is not type(module).forward:
        raise InvalidInput(
            f"{type(module).__name__} has been given another forward, which moetor's would bypass; attach before that"
        )
    module.__dict__[place] = Forward(module)


def runner_of(module: nn.Module) -> str:
    """`SEAM` if the module's calls reach moetor, else the name of what transformers runs."""
    # by the note of its adapter, if it has one: torch.compile cannot look at the class as is_decorated does
    if module.__dict__.get(ADAPTER_KEY) == decorated.ADAPTER.name or decorated.is_decorated(module):
        config: Any = module.config
        return config._experts_implementation_internal or "eager"
    given = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    return SEAM if isinstance(given, Forward) else "eager"


class Forward:
    """The forward of an adapted module, as an attribute of the module itself.

    It follows the module into copies and pickles, and keeps no cycle of references alive: a model
    that is deleted gives back its memory at once.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "only the module itself holds this"
        facts, adapter = facts_of(module), adapter_of(module)
        assert adapter.forward is not None, "transformers calls such a module's experts by itself"
        # the one function that transformers calls, too
        run = functools.partial(ALL_EXPERTS_FUNCTIONS[SEAM], module)
        hooked = [holder for holder in adapter.holders(module, facts) if "_hf_hook" in holder.__dict__]
        if not hooked:
            return adapter.forward(module, facts, run, *args, **kwargs)
        with _in_place(hooked):
            return adapter.forward(module, facts, run, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Forward, (self._module(),)


@contextmanager
def _in_place(hooked: list[nn.Module]) -> Iterator[None]:
    """Have these modules' weights on their device: accelerate's hooks bring them for the time of a call only.

    For modules whose weights are read without calling them.
    """
    with ExitStack() as after:
        for module in hooked:
            hook: Any = module._hf_hook
            hook.pre_forward(module)
            after.callback(hook.post_forward, module, None)
        yield
