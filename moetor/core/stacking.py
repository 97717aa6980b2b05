"""Experts that are modules of their own, moved into one tensor, and read as one again.

`stack_experts` makes views of one stack of the parameters; `joined` finds that they are, at each
call and from their addresses alone. So nothing can be stale: parameters that were moved apart
since (`.to()`, a deep copy, `load_state_dict(assign=True)`) are a list again.

Letters: E experts; N and K are the output and input size of one matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .errors import InvalidInput

# Others, as DTensor or what a library packs, have no memory that can be read like this.
_PLAIN = (Tensor, nn.Parameter)


def stack_experts(model: nn.Module) -> nn.Module:
    """Move the weights of experts that are modules of their own into one tensor a layer.

    Every backend can then read them without a copy; `eager` could before. The parameters stay the
    same objects under the same names: optimizers, `state_dict` and checkpoints do not change, and
    gradients reach them. What moves parameters apart again (`.to()` another device or dtype,
    `copy.deepcopy`) undoes it; call it once more after that.

    The peak of memory is that of the model and one layer's largest stack.

    Args:
        model: changed in place. Every `nn.ModuleList` or `nn.ModuleDict` in it that is called
            `experts` is stacked; or `model` is such a list itself.

    Returns:
        The same model.

    Raises:
        InvalidInput: no such list, or one whose members differ in their parameters, or whose
            parameters are not plain tensors with memory of their own; nothing is changed.

    >>> import torch, moetor
    >>> experts = torch.nn.ModuleList(torch.nn.Linear(4, 6) for _ in range(3))
    >>> _ = moetor.stack_experts(experts)
    >>> moetor.Weight.of([expert.weight for expert in experts]).data.shape
    torch.Size([3, 6, 4])
    """
    lists = [module for name, module in model.named_modules() if f".{name}".endswith(".experts") and _is_list(module)]
    lists = lists or ([model] if _is_list(model) else [])
    if not lists:
        raise InvalidInput(f"stack_experts needs a ModuleList `experts` to stack, {type(model).__name__} has none")
    stacks = [stack for experts in lists for stack in _alike(list(experts._modules.values()))]
    with torch.no_grad():
        for rows in stacks:
            _move(rows)
    return model


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """E tensors of one shape as one (E, …), a view with gradients, or None if they do not lie in one.

    Always None while compiling: a graph knows no addresses, and could not follow if they change.
    """
    if torch.compiler.is_compiling() or not _equally_spaced(tensors):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        out: Tensor = _Joined.apply(*tensors)
        return out
    return _view(tensors)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 0


def _alike(experts: list[nn.Module | None]) -> list[list[list[nn.Parameter]]]:
    """Parameters of one shape and dtype side by side, [expert][parameter]: a stack each.

    Matrices of one shape, as those of gate and up, so become neighbours and can be read as one.
    """
    named = [dict(expert.named_parameters()) for expert in experts if expert is not None]
    if len(named) < len(experts):
        raise InvalidInput("a list of experts with gaps (those of other ranks) cannot be stacked")
    everything = [parameter for parameters in named for parameter in parameters.values()]
    if len({id(parameter) for parameter in everything}) != len(named[0]) * len(experts):
        raise InvalidInput("experts that share parameters, or have different ones, cannot be stacked")
    groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, first in named[0].items():
        for parameters in named:
            _require_plain(name, parameters.get(name), first)
        groups.setdefault((first.shape, first.dtype), []).append(name)
    return [[[parameters[name] for name in names] for parameters in named] for names in groups.values()]


def _require_plain(name: str, parameter: nn.Parameter | None, first: nn.Parameter) -> None:
    if parameter is None:
        raise InvalidInput(f"experts can be stacked if all have the same parameters; one lacks {name!r}")
    if type(parameter) is not nn.Parameter or parameter.is_meta:
        kind = "on the meta device, or offloaded" if parameter.is_meta else type(parameter).__name__
        raise InvalidInput(
            f"experts can be stacked if their parameters are plain tensors in memory; {name!r} is {kind}"
        )
    if (parameter.shape, parameter.dtype, parameter.device) != (first.shape, first.dtype, first.device):
        raise InvalidInput(f"experts can be stacked if they agree in shape, dtype and device; {name!r} differs")


def _move(rows: list[list[nn.Parameter]]) -> None:
    first = rows[0][0]
    stack = torch.empty((len(rows), len(rows[0]), *first.shape), dtype=first.dtype, device=first.device)
    for room, parameters in zip(stack, rows, strict=True):
        for place, parameter in zip(room, parameters, strict=True):
            place.copy_(parameter)
            parameter.data = place  # frees what it had


def _equally_spaced(tensors: Sequence[Tensor]) -> bool:
    """Whether tensor e lies e steps behind the first, in the same memory."""
    first = tensors[0]
    if type(first) not in _PLAIN or first.is_meta:
        return False
    step = _step_bytes(tensors)
    if step <= 0 or step % first.element_size():
        return False
    address, shape, stride, dtype = first.data_ptr(), first.shape, first.stride(), first.dtype
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.data_ptr() != address:
            return False
        if tensor.shape != shape or tensor.stride() != stride or tensor.dtype != dtype:
            return False
        address += step
    # what starts inside the first one's memory lies in it, as all are alive; two allocations may be equally spaced, too
    storage = first.untyped_storage()
    return address - step < storage.data_ptr() + storage.nbytes()


def _step_bytes(tensors: Sequence[Tensor]) -> int:
    return tensors[1].data_ptr() - tensors[0].data_ptr() if len(tensors) > 1 else tensors[0].nbytes


def _view(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0].detach()
    step = _step_bytes(tensors) // first.element_size()
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):  # type: ignore[no-untyped-def]
        return _view(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return tuple(
            part if wanted else None for part, wanted in zip(grad.unbind(0), ctx.needs_input_grad, strict=True)
        )
