"""Look at a module whose first call is being traced by torch.compile or torch.export.

Its gate is recognised by computing it, which must not become part of the graph. torch.compile offers `comptime`, which
runs a function while it traces; torch.export calls the model under modes that are switched off meanwhile.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.utils._python_dispatch import _disable_current_modes


def look(module: nn.Module, key: str, read: Callable[[nn.Module], Any]) -> None:
    """Set `module.__dict__[key] = read(module)` if it is not set, once, while tracing.

    An `assume_constant_result` function would do it too, but would tie the graph to this one module.
    """
    comptime(_look_inside_dynamo)
    if key not in module.__dict__:  # torch.export without Dynamo
        with _disable_current_modes():
            module.__dict__[key] = read(module)


def _look_inside_dynamo(context: ComptimeContext) -> None:
    def value_of(local: str) -> Any:
        return context.get_local(local)._i_will_not_complain_if_bc_breaks_VariableTracker()

    module, key = value_of("module").realize().value, value_of("key").as_python_constant()
    if key not in module.__dict__:
        module.__dict__[key] = value_of("read").get_function()(module)
