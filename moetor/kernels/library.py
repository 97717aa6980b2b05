"""Where our operators are registered: the namespace torch.ops.moetor.

`Library.define` and not `torch.library.custom_op`: 3 µs a call against 8 (22 with a gradient).
In a program of ours an operator is called inside an `autograd.Function` or without gradients, but
`torch.export` takes the functions away and leaves the operators, so each knows its gradient too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..core.errors import BackendRefused

Result = Tensor | list[Tensor]

_LIBRARY = torch.library.Library("moetor", "DEF")


def define(
    schema: str,
    implementation: Callable[..., Result],
    fake: Callable[..., Result],
    gradient: type[Function] | None = None,
    syncs: bool = False,
) -> None:
    """Register an operator.

    Args:
        schema: "name(Tensor x, …) -> Tensor", or "-> Tensor[]".
        implementation: runs it, on any device.
        fake: gives empty results of the right shapes, dtypes and devices, for tracing.
        gradient: a Function of the same arguments; its `setup_context` and `backward` are the
            operator's. Without one, a backward pass through the operator is an error.
        syncs: the host waits for values, so that torch.compile must not put it into a CUDA graph.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,) if syncs else ())
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moetor::{name}", fake, lib=_LIBRARY)
    backward, setup_context = (
        (_no_gradient(name), None) if gradient is None else (gradient.backward, gradient.setup_context)
    )
    torch.library.register_autograd(f"moetor::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def needs_operator(x: Tensor) -> bool:
    """Whether a call has to be an operator: it is traced, or its tensors are no plain ones (fake tensors)."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter)


def run(operator: torch._ops.OpOverload, *arguments: Any) -> Any:
    """Call an operator where autograd has nothing to do: without gradients, or inside a Function.

    Looking whether it has costs 4 µs, most of them in Python; while tracing that is no matter.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def autograd_looks_at(*tensors: Tensor) -> bool:
    """Whether a product with these needs a Function around it: for a gradient, or to refuse a forward-mode one."""
    if not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _no_gradient(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise BackendRefused(f"torch.ops.moetor.{name} has no gradient; run it inside torch.no_grad()")

    return backward
