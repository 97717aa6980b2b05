"""One tensor of a module, if it is what it looks like."""

from torch import Tensor, nn

from ....core.errors import InvalidInput

_HINT = "which moetor does not read; load the model without that quantisation"


def plain(module: nn.Module, name: str) -> Tensor:
    """The module's tensor of this name, asked for by attribute, so that a parametrization takes part.

    Raises:
        InvalidInput: it is of a class by another library, whose numbers are not the bytes that a
            kernel would read.
    """
    tensor: Tensor = getattr(module, name)
    kind = type(tensor)
    if kind is nn.Parameter or kind is Tensor or kind.__module__.partition(".")[0] == "torch":
        return tensor
    library = kind.__module__.partition(".")[0]
    raise InvalidInput(f"{type(module).__name__}.{name} is a {kind.__name__} of {library}, {_HINT}")


def require_unpacked(module: nn.Module, *names: str) -> None:
    """Raise InvalidInput, naming the first of these tensors that holds packed numbers or codes."""
    for name in names:
        tensor = plain(module, name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise InvalidInput(
                f"{type(module).__name__}.{name} holds packed or quantised numbers ({tensor.dtype}), {_HINT}"
            )
