"""Experts of transformers in a quantised format: a module keeps its class, gate, biases and names; its weights change.

A module that holds quantised experts carries a `Stored` that says how. Its parameters are those of
the checkpoints: gate_up_proj and gate_up_proj_scale_inv, gate_up_proj_activation_scale where
activations are static; or gate_up_proj_blocks and gate_up_proj_scales, as gpt-oss has them.
Quantised matrices are stored (E, out, in), whatever the dense ones of the module were.

Letters: E experts; N and K are the output and input size of one matrix.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ...core.formats import FORMATS, Format, fp8, mxfp4
from ...core.weights import Weight
from ...quantization import dequantize, split_gate_up, weight_of_blocks

_STORED = "_moetor_stored"


@dataclass(frozen=True, slots=True)
class Stored:
    """How a module holds its weights.

    Attributes:
        format: name of their format; what scales are is known for sure once they are there.
        sizes: (E, N, K) of each weight, by its dense name.
        blocks: whether payload and scales are `_blocks` (E, N, K/32, 16) and `_scales`.
    """

    format: str
    sizes: dict[str, tuple[int, int, int]]
    blocks: bool = False

    def names(self, weight: str) -> list[str]:
        """Its parameters in place of one weight: payload, scale and, for static activations, theirs."""
        if self.blocks:
            return [f"{weight}_blocks", f"{weight}_scales"]
        static = FORMATS[self.format].activation_scheme == "static"
        return [weight, f"{weight}_scale_inv"] + [f"{weight}_activation_scale"] * static

    def all_names(self) -> set[str]:
        return {name for weight in self.sizes for name in self.names(weight)}


def stored_in(module: nn.Module) -> Stored | None:
    """How the module holds its quantised weights; None: it holds dense ones."""
    return module.__dict__.get(_STORED)


def make_room(module: nn.Module, format: Format, *, blocks: bool = False, keep_dense: bool = False) -> None:
    """Put empty parameters on the meta device where the module's dense weights are.

    Args:
        module: one that transformers runs through its experts interface; sizes are its own.
        keep_dense: add the scales only; the weights will be quantised when they have been read.

    Raises:
        InvalidInput: the format cannot take a weight of this size.
    """
    flags: Any = module
    sizes = {}
    for name in ("gate_up_proj" if flags.has_gate else "up_proj", "down_proj"):
        E, rows, columns = getattr(module, name).shape
        sizes[name] = (E, columns, rows) if flags.is_transposed else (E, rows, columns)
        if format.bits == 4 and sizes[name][2] % 32:
            raise InvalidInput(
                f"{name} in {format.name} needs an inner size divisible by 32, got {sizes[name][2]}; use fp8"
            )
    stored = Stored(format.name, sizes, blocks)
    for name, (E, N, K) in sizes.items():
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((E, N, K // 32, 16) if blocks else (E, N, K // format.per_element), format.payload_dtypes[0]),
            ((E, *format.scale_shape(N, K)), torch.uint8 if blocks else torch.float32),
            ((E,), torch.float32),
        ]
        for part, (shape, dtype) in zip(stored.names(name), shapes, strict=False):
            if keep_dense and part == name:
                continue
            empty = torch.empty(shape, dtype=torch.uint8 if blocks else dtype, device="meta")
            module.register_parameter(part, nn.Parameter(empty, requires_grad=False))
        if blocks:
            del module._parameters[name]
    module.__dict__[_STORED] = stored
    # nothing of it is to be drawn at random; what a checkpoint lacks is an error
    module._is_hf_initialized = True  # type: ignore[assignment]


def put_dense(module: nn.Module, dtype: torch.dtype) -> None:
    """Dequantise the module's weights, in place, one expert at a time."""
    stored, flags = stored_in(module), cast(Any, module)
    assert stored is not None
    for name, (E, N, K) in stored.sizes.items():
        weight = weight_of(module, stored, name, None)
        parts = weight if isinstance(weight, tuple) else (weight,)
        shape = (E, K, N) if flags.is_transposed else (E, N, K)
        dense = torch.empty(shape, dtype=dtype, device=parts[0].first.device)
        dense_ENK = dense.transpose(1, 2) if flags.is_transposed else dense
        start = 0
        for part in parts:
            for expert, pieces in enumerate(zip(part.matrices(), part.scales(), strict=True)):
                dense_ENK[expert, start : start + part.out_features] = dequantize(*pieces, FORMATS[part.format], dtype)
            start += part.out_features
        for parameter in stored.names(name):
            delattr(module, parameter)
        module.register_parameter(name, nn.Parameter(dense))
    del module.__dict__[_STORED]


def weight_of(module: nn.Module, stored: Stored, name: str, bias: Tensor | None) -> Weight | tuple[Weight, Weight]:
    """One weight of a quantised module as it is now; a pair where gate and up rows were quantised apart.

    They were where there are scales of their own for each half: one each for FP8 per tensor, or as
    many rows of blocks as two matrices of I rows have.

    Raises:
        InvalidInput: payload and scales do not fit the format.
    """
    payload, scale, *static = (getattr(module, part) for part in stored.names(name))
    if stored.blocks:
        return weight_of_blocks(payload, scale, bias)
    format, activation_scale = FORMATS[stored.format], static[0] if static else None
    if name == "gate_up_proj" and _apart(module, format, payload, scale):
        gate, up = split_gate_up(payload, scale, format, bias, _column(activation_scale, 0))
        return gate, replace(up, activation_scale=_column(activation_scale, 1))
    return Weight(payload, bias, scale, stored.format, activation_scale=activation_scale)


def settle(module: nn.Module, *, uint8_is_e8m0: bool) -> None:
    """Take what was loaded as it is: freeze it, and let its scales say whether they are e8m0.

    Scales of float32 are never rounded to powers of two, nor are powers of two taken for others.

    Raises:
        InvalidInput: a parameter is of another dtype or size than its format needs; it is named.
    """
    stored = stored_in(module)
    assert stored is not None
    kinds = set()
    for name, (E, N, K) in stored.sizes.items():
        payload_name, scale_name, *static = stored.names(name)
        payload, scale = getattr(module, payload_name), getattr(module, scale_name)
        needed = (E, N, K // 32, 16) if stored.blocks else (E, N, K // FORMATS[stored.format].per_element)
        if payload.shape != needed:
            raise InvalidInput(f"{payload_name} needs shape {needed}, got {tuple(payload.shape)}")
        if scale.dtype in (torch.bfloat16, torch.float16):
            scale = nn.Parameter(scale.float())
            setattr(module, scale_name, scale)
        kinds.add(_kind(scale_name, scale, uint8_is_e8m0))
        for part in (payload_name, scale_name, *static):
            getattr(module, part).requires_grad_(False)
    if len(kinds) > 1:
        raise InvalidInput(f"the scales of {' and '.join(stored.sizes)} need to be of one kind, got {sorted(kinds)}")
    module.__dict__[_STORED] = stored = replace(stored, format=_with_scales(stored, kinds.pop()).name)
    for name in stored.sizes:
        try:
            weight_of(module, stored, name, None)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from None


def _apart(module: nn.Module, format: Format, payload: Tensor, scale: Tensor) -> bool:
    flags: Any = module
    rows, columns = payload.shape[1], payload.shape[2] * format.per_element
    if not flags.is_concatenated or rows % 2 or scale.dim() != 3 or format.block is None:
        return False
    # blocks whose height divides I are the same for a matrix of both and for two
    divides = format.block[0] and rows // 2 % format.block[0] == 0
    return not divides and scale.shape[1] == 2 * format.scale_shape(rows // 2, columns)[0]


def _column(activation_scale: Tensor | None, index: int) -> Tensor | None:
    """Static scales (E,) of both halves, or (E, 2) of each."""
    if activation_scale is None or activation_scale.dim() == 1:
        return activation_scale
    return activation_scale[:, index]


def _kind(name: str, scale: Tensor, uint8_is_e8m0: bool) -> str:
    if scale.dtype == torch.float32:
        return "float32"
    if scale.dtype == torch.float8_e8m0fnu or (scale.dtype == torch.uint8 and uint8_is_e8m0):
        return "e8m0"
    hint = "; bytes are exponents only where the config says scale_fmt='ue8m0'" if scale.dtype == torch.uint8 else ""
    raise InvalidInput(f"{name} needs scales of float32 or float8_e8m0fnu, got {scale.dtype}{hint}")


def _with_scales(stored: Stored, kind: str) -> Format:
    format = FORMATS[stored.format]
    assert format.block is not None
    if format.bits == 4:
        return mxfp4(kind, format.activation_scheme)
    return fp8(format.block, kind, format.activation_scheme)
