"""Loading a model and its tokenizer for a command, and the clock that watches it write. Imports transformers."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers import logging as transformers_logging
from transformers.generation.streamers import BaseStreamer

import moetor

from .terminal import errors_in_one_line, fail

# what transformers raises for a folder, a hub id or a file that is not what it should be; RuntimeError: wrong shapes
LOADING_ERRORS = (OSError, ValueError, ImportError, RuntimeError, SafetensorError)

# classes that can write, by the name they have both here and in transformers
WRITERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM")


def load(
    model: str, experts_implementation: str | dict[str, str], dtype: torch.dtype | str, device: torch.device
) -> tuple[Any, Any]:
    """The model, in eval mode on its device, and its tokenizer; ends the command with one line if it cannot be had."""
    transformers_logging.set_verbosity_error()
    looks_like_folder = model.startswith((".", "/", "~")) or model.endswith(os.sep)
    folder = Path(model).expanduser()
    if looks_like_folder and not folder.is_dir():
        raise fail(f"there is no folder {model}", 2)
    name = str(folder) if folder.is_dir() else model
    with errors_in_one_line(*LOADING_ERRORS):
        tokenizer = AutoTokenizer.from_pretrained(name)
        loaded = _writer(name).from_pretrained(name, dtype=dtype, experts_implementation=experts_implementation)
    with errors_in_one_line(RuntimeError):  # the device is full
        return loaded.to(device).eval(), tokenizer


def encode(tokenizer: Any, prompt: str, device: torch.device) -> torch.Tensor:
    """Token ids (1, T) of the prompt; ends the command with one line if there are none."""
    ids: torch.Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"].long().to(device)
    if not ids.numel():
        raise fail("the prompt holds no tokens; give it some text", 2)
    return ids


def _writer(name: str) -> Any:
    """moetor's Auto class for the architecture that the checkpoint names; the causal one if none is known."""
    config = AutoConfig.from_pretrained(name)
    for writer in WRITERS:
        known = getattr(transformers, writer)._model_mapping
        if type(config) in known and known[type(config)].__name__ in (config.architectures or ()):
            return getattr(moetor, writer)
    return moetor.AutoModelForCausalLM


def padding_id(tokenizer: Any) -> int | None:
    """What `generate` wants to be told, or warns about, even though one sequence needs no padding."""
    padding: int | None = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return padding


class Clock(BaseStreamer):
    """Notes when the prompt went in and when each token came out; hands both on to `inner`."""

    def __init__(self, inner: BaseStreamer | None = None) -> None:
        self.inner = inner
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return max(len(self.times) - 1, 0)

    @property
    def prefill_s(self) -> float:
        """From the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first; nan if there are none."""
        return (self.num_tokens - 1) / (self.times[-1] - self.times[1]) if self.num_tokens > 1 else float("nan")
