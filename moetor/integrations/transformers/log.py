"""One line a model on which experts backend runs where, and one for every change, at INFO on the logger "moetor"."""

import logging
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from .choice import current
from .explain import explain_model

logger = logging.getLogger("moetor")


def attached(model: PreTrainedModel) -> None:
    """Log what runs in a model that moetor has just been given, in inference."""
    if logger.isEnabledFor(logging.INFO):
        with torch.no_grad():
            logger.info("%s", explain_model(model).line())


def changed(model: PreTrainedModel, before: Mapping[str, str]) -> None:
    """Log the keys that read another backend than before, if there are any."""
    now = current(model)
    changes = [f"{key or 'experts'} {before[key]} -> {name}" for key, name in now.items() if name != before[key]]
    if changes:
        logger.info("%s: %s", type(model).__name__, ", ".join(changes))
