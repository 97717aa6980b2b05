"""A checkpoint that lacks experts, or cannot be read, is an error; transformers goes on with random weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ...core.errors import CheckpointError
from .adapters import is_experts


@contextmanager
def readable(name_or_path: Any) -> Iterator[None]:
    """Say which checkpoint it was that safetensors could not read."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"a file of checkpoint {str(name_or_path)!r} cannot be read: {error}") from error


def require_all_experts(model: PreTrainedModel, info: Mapping[str, Any], name_or_path: Any) -> None:
    """Raise CheckpointError if tensors of an experts module did not come from the checkpoint."""
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if is_experts(module))
    for what, keys in (("lacks", info["missing_keys"]), ("has another shape for", info["mismatched_keys"])):
        names = sorted(key if isinstance(key, str) else key[0] for key in keys)
        of_experts = [name for name in names if name.startswith(prefixes)] if prefixes else []
        if of_experts:
            shown = ", ".join(of_experts[:4]) + (f" and {len(of_experts) - 4} more" if len(of_experts) > 4 else "")
            raise CheckpointError(f"checkpoint {str(name_or_path)!r} {what} expert weights: {shown}")
