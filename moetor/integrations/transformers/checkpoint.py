"""A checkpoint that does not fit the model, or cannot be read, is one clear error.

transformers goes on with random weights where a whole layer's experts are missing, and raises
"see the report above" where one tensor is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ...core.errors import CheckpointError
from .adapters import is_experts
from .checkpoint_files import find_fault, listed


@contextmanager
def explained(name_or_path: Any, keywords: Mapping[str, Any]) -> Iterator[None]:
    """Raise CheckpointError in place of what transformers raises for files that are at fault.

    Any other error, also one of these types, passes as it is.
    """
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        if fault := find_fault(name_or_path, keywords):
            raise CheckpointError(f"checkpoint {str(name_or_path)!r} {fault}") from error
        raise


def require_fit(
    model: PreTrainedModel, info: Mapping[str, Any], name_or_path: Any, keywords: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if experts, or anything of another shape, did not come from the checkpoint.

    Args:
        info: of a load with `ignore_mismatched_sizes=True`.
        keywords: what the user gave. Their `ignore_mismatched_sizes` holds for all but experts.
    """
    experts = tuple(f"{name}." for name, module in model.named_modules() if is_experts(module))
    lacking = sorted(key for key in info["missing_keys"] if key.startswith(experts))
    unlike = {key: f"{key} {tuple(found)}, not {tuple(needed)}" for key, found, needed in info["mismatched_keys"]}
    if keywords.get("ignore_mismatched_sizes"):
        unlike = {key: text for key, text in unlike.items() if key.startswith(experts)}
    if not lacking and not unlike:
        return
    # The names above are those of stacked weights; the files have one for each expert.
    fault = find_fault(name_or_path, keywords)
    if fault is None and lacking:
        fault = f"lacks expert weights: {listed(lacking)}"
    if fault is None:
        fault = f"has another shape than the model for {listed(unlike[key] for key in sorted(unlike))}"
    raise CheckpointError(f"checkpoint {str(name_or_path)!r} {fault}")
