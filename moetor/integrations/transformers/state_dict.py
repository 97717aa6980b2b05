"""State dicts as files have them, loaded into a model that was built already.

Files have one tensor per expert, under names of their own, and transformers stacks them in `from_pretrained` only. Its
Trainer resumes by `load_state_dict(..., strict=False)`: without this page experts keep what they were built with, and
a warning of missing keys is all that tells.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ...core.errors import CheckpointError
from .adapters import is_experts
from .checkpoint_files import listed

_OF_EXPERTS = re.compile(r"\bexperts\b")
_OF_ONE_EXPERT = re.compile(r"\bexperts\.\d+\.")


def as_model_has_it(model: PreTrainedModel, base: Any, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict under the names and in the shapes of the model; the same one if it has them already.

    Args:
        base: transformers' class of the model, which converts by its `from_pretrained`, into memory of its own.

    Raises:
        CheckpointError: it has weights of single experts, and not all that the model has stacked.
    """
    experts = {
        f"{name}.{key}": parameter.numel()
        for name, module in model.named_modules()
        if is_experts(module)
        for key, parameter in module.named_parameters()
    }
    lacking = experts.keys() - state_dict.keys()
    unknown = state_dict.keys() - model.state_dict().keys()
    foreign = set(filter(_OF_EXPERTS.search, unknown))
    # granitemoe's files have no "experts" in their names: what is lacking may be there if there are numbers enough
    enough = sum(state_dict[key].numel() for key in unknown) >= sum(experts[key] for key in lacking)
    if not lacking or not (foreign or enough):
        return state_dict
    cause = None
    if getattr(model.config, "quantization_config", None) is None:
        try:
            found, lacking = _converted(model, base, state_dict, set(experts))
        except RuntimeError as error:  # transformers' for experts that lack a part
            cause = error
        else:
            if not lacking:
                return found
    if single := sorted(filter(_OF_ONE_EXPERT.search, foreign)):
        raise CheckpointError(
            f"state dict has weights of single experts ({listed(single)}), which {base.__name__} has stacked, and lacks"
            f" some of {listed(sorted(lacking))}; load all files together, or the folder with from_pretrained"
        ) from cause
    return state_dict


def _converted(
    model: PreTrainedModel, base: Any, state_dict: Mapping[str, Any], experts: set[str]
) -> tuple[dict[str, Any], set[str]]:
    """What the state dict holds, converted as far as it can be, and the experts that it lacks."""
    # a dtype of the config's would round weights that are trained in another
    dtypes = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    other, info = base.from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=dict(state_dict),
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    unlike = {key for key, *_ in info["mismatched_keys"]}
    missing = unlike.union(info["missing_keys"])
    found = {key: value for key, value in other.state_dict().items() if key not in missing}
    # what does not fit is left for load_state_dict to tell
    found |= {key: state_dict[key] for key in unlike.union(info["unexpected_keys"]) & state_dict.keys()}
    return found, experts & missing
