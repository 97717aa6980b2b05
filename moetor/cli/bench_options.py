"""What `moetor bench` and `moetor tune` are told, from text to what it means."""

from collections.abc import Iterable

import torch

from ..bench.configs import shape_of_model
from ..bench.shapes import Shape, parse_shapes
from ..core.errors import InvalidInput, unknown_name
from ..core.formats import FORMATS
from .machine import default_device
from .terminal import fail

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PASSES = {"forward": False, "training": True}
# the scales of static formats come from a calibration
MEASURED_FORMATS = [name for name, format in FORMATS.items() if format.activation_scheme != "static"]


def shapes_of(names: list[str] | None, models: list[str] | None) -> list[Shape]:
    if not names and not models:
        raise InvalidInput("needs --shape or --model; --list names the shapes of real models")
    shapes = [shape for text in names or () for shape in parse_shapes(text)]
    return [*shapes, *(shape_of_model(path) for path in models or ())]


def names_of(what: str, text: str, known: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise unknown_name(what, name, known)
    if not names:
        raise InvalidInput(f"needs a {what}, got {text!r}; known: {', '.join(known)}")
    return names


def counts_of(text: str) -> list[int]:
    counts = [int(count) if count.strip().isdecimal() else 0 for count in text.split(",")]
    if not all(counts):
        raise InvalidInput(f"token counts must be numbers of at least 1, got {text}")
    return counts


def device_named(name: str) -> torch.device:
    try:
        device = torch.device(name) if name else default_device()
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # no such device; torch built without CUDA
        raise fail(f"cannot use the device {name!r}: {error}", 2) from error
    return device
