"""What is wrong with the files of a checkpoint, for naming it once a load has failed.

transformers stacks one tensor per expert while loading; when that fails its error tells neither
which tensor nor which file it was. The files are compared with each other only, so this knows
nothing of models, and finds nothing where it cannot look (other formats than safetensors).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

# "model.layers.0.mlp.experts." "3" "gate_proj.weight"
_ONE_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)\.(.+)")

# Names of a matrix's scales, beside "weight".
_SCALES = ("weight_scale_inv", "scale", "qscale_weight", "weight_scale")
_PAYLOADS = ("F8_E4M3", "I8", "U8")
_OTHER_PAYLOADS = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

_Shape = tuple[int, ...]
_Tensor = tuple[_Shape, str]  # its shape and its dtype, as safetensors writes it


def find_fault(name_or_path: Any, keywords: Mapping[str, Any]) -> str | None:
    """A sentence that follows "checkpoint X …", or None if the files look right.

    Args:
        name_or_path, keywords: as given to `from_pretrained`; a hub id is looked up in the cache.
    """
    folder = _folder(name_or_path, keywords)
    if folder is None:
        return None
    tensors: dict[str, _Tensor] = {}
    try:
        files = _weight_files(folder, keywords.get("variant"))
    except (ValueError, LookupError, TypeError) as error:
        return f"has an index that cannot be read: {error!r}"
    for file in files:
        if not file.is_file():
            return f"lacks the file {file.name!r} that its index names"
        try:
            tensors |= _tensors_of(file)
        except SafetensorError as error:
            return f"has a file {file.name!r} that cannot be read: {error}"
    fault = _fault_of_experts({key: shape for key, (shape, _) in tensors.items()})
    return fault or _fault_of_scales({key: dtype for key, (_, dtype) in tensors.items()})


def unreadable_matrices(name_or_path: Any, keywords: Mapping[str, Any]) -> str | None:
    """The same of a quantised one that transformers could read: matrices without scales, or of other kinds of FP8."""
    dtypes = _dtypes(name_or_path, keywords)
    if other := [key for key, dtype in dtypes.items() if dtype in _OTHER_PAYLOADS]:
        return f"needs payload of F8_E4M3, got {dtypes[other[0]]}: {listed(other)}"
    return _fault_of_scales(dtypes, ("F8_E4M3", "I8"))


def packed_tensors(name_or_path: Any, keywords: Mapping[str, Any]) -> list[str]:
    """Names of the payloads: what is of one byte an element, and no scale."""
    dtypes = _dtypes(name_or_path, keywords)
    return [key for key, dtype in dtypes.items() if dtype in _PAYLOADS and not key.endswith((*_SCALES, "_scales"))]


def _dtypes(name_or_path: Any, keywords: Mapping[str, Any]) -> dict[str, str]:
    folder = _folder(name_or_path, keywords)
    files = _weight_files(folder, keywords.get("variant")) if folder is not None else []
    return {key: dtype for file in files for key, (_, dtype) in _tensors_of(file).items()}


def _tensors_of(file: Path) -> dict[str, _Tensor]:
    with safe_open(file, framework="pt") as tensors:
        parts = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118
        return {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in parts.items()}


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many there are besides."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _folder(name_or_path: Any, keywords: Mapping[str, Any]) -> Path | None:
    if name_or_path is None:
        return None
    subfolder = keywords.get("subfolder") or ""
    if Path(name_or_path).is_dir():
        return Path(name_or_path, subfolder)
    try:
        config = try_to_load_from_cache(
            str(name_or_path),
            str(PurePosixPath(subfolder, "config.json")),
            cache_dir=keywords.get("cache_dir"),
            revision=keywords.get("revision"),
        )
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    """The safetensors files that transformers would read; an error if the index is broken."""
    infix = f".{variant}" if variant else ""
    single, index = folder / f"model{infix}.safetensors", folder / f"model.safetensors.index{infix}.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _fault_of_experts(shapes: Mapping[str, _Shape]) -> str | None:
    """Tensors that the other experts of a layer have, and those whose shape is unlike the others'."""
    layers: dict[str, dict[str, dict[int, _Shape]]] = {}
    for key, shape in shapes.items():
        if match := _ONE_EXPERT.fullmatch(key):
            layer, expert, part = match.groups()
            layers.setdefault(layer, {}).setdefault(part, {})[int(expert)] = shape
    lacking = []
    for layer, parts in layers.items():
        num_experts = 1 + max(max(experts) for experts in parts.values())
        for part, experts in parts.items():
            lacking += [f"{layer}{expert}.{part}" for expert in range(num_experts) if expert not in experts]
    if lacking:
        return f"lacks expert weights: {listed(lacking)}"
    for layer, parts in layers.items():
        for part, experts in parts.items():
            usual, count = Counter(experts.values()).most_common(1)[0]
            odd = [f"{layer}{expert}.{part} {shape}" for expert, shape in experts.items() if shape != usual]
            if 0 < len(odd) < count:
                return f"has expert weights of another shape than the other experts' {usual}: {listed(odd)}"
    return None


def _fault_of_scales(dtypes: Mapping[str, str], kinds: Sequence[str] = ("F8_E4M3",)) -> str | None:
    """Matrices of these dtypes without a scale beside them: nobody can know what they are."""
    stems = [key.removesuffix(".weight") for key, dtype in dtypes.items() if dtype in kinds and key.endswith(".weight")]
    lacking = [f"{stem}.weight" for stem in stems if not any(f"{stem}.{scale}" in dtypes for scale in _SCALES)]
    return f"lacks the scales of {listed(lacking)}" if lacking else None
