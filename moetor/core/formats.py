"""How the numbers of one stack of experts are stored.

A format is data: backends read it in `why_not`, quantisation reads it to encode and decode. A
Weight carries its name, since torch.compile traces strings and not objects of ours as defaults.

A quantised matrix (N, K) is a payload, small numbers q, and scales, one a block: W = q · scale.
"""

from dataclasses import dataclass

import torch

from .errors import InvalidInput

ACTIVATION_GROUP = 128
"""Columns of an activation that share one scale, where `activation_scheme` is "dynamic"."""

# The payloads there are, by bits: dtypes (int8 and uint8 hold two numbers a byte) and largest number.
_PAYLOADS = {8: ((torch.float8_e4m3fn,), 448.0), 4: ((torch.int8, torch.uint8), 6.0)}
# What a scale means, and the dtypes that can mean it: a byte b of e8m0 is 2^(b − 127).
_SCALES = {"float32": (torch.float32,), "e8m0": (torch.float8_e8m0fnu, torch.uint8)}
_SCHEMES = (None, "dynamic", "static")


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store weights, and how activations are rounded before they meet them.

    Attributes:
        name: as in tables, errors and `moetor doctor`.
        bits: bits an element takes, without its scale. 8: e4m3. 4: e2m1, two a byte, the even
            column in the low nibble. 0: those of the tensor's own dtype.
        block: (rows, columns) that share one scale, counted from the first row and column, so that
            those at the other edges may be partial; 0 means the whole extent. None: no scales.
        scale: what scales are, "float32" or "e8m0" (powers of two). They are declared, never told
            from a dtype alone: uint8 scales of an e8m0 format are exponents, and any others are refused.
        activation_scheme: None: activations are not rounded. "dynamic": to e4m3, with a scale of
            amax/448 per row and 128 columns. "static": to e4m3, with one given scale an expert.

    >>> FORMATS["fp8"].block, FORMATS["mxfp4"].scale
    ((128, 128), 'e8m0')
    """

    name: str
    bits: int = 0
    block: tuple[int, int] | None = None
    scale: str | None = None
    activation_scheme: str | None = None

    def __post_init__(self) -> None:
        if self.activation_scheme not in _SCHEMES:
            raise InvalidInput(f"activation_scheme must be one of {_SCHEMES}, got {self.activation_scheme!r}")
        if self.block is None:
            if self.bits or self.scale or self.activation_scheme:
                raise InvalidInput(f"a format without blocks has no scales, got {self}")
            return
        if self.bits not in _PAYLOADS or self.scale not in _SCALES:
            raise InvalidInput(f"a quantised format has 8 or 4 bits and scales of float32 or e8m0, got {self}")
        if len(self.block) != 2 or any(not isinstance(size, int) or size < 0 for size in self.block):
            raise InvalidInput(f"a block must be two numbers of rows and columns, 0 for all, got {self.block}")

    @property
    def quantized(self) -> bool:
        """Whether the stored numbers need scales to mean anything."""
        return self.block is not None

    @property
    def per_element(self) -> int:
        """Numbers that one element of the payload holds."""
        return 2 if self.bits == 4 else 1

    @property
    def largest(self) -> float:
        """The largest number of the payload."""
        return _PAYLOADS[self.bits][1]

    @property
    def payload_dtypes(self) -> tuple[torch.dtype, ...]:
        return _PAYLOADS[self.bits][0]

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return _SCALES[self.scale] if self.scale else ()

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of one matrix.

        >>> FORMATS["fp8"].scale_shape(576, 7168)
        (5, 56)
        """
        assert self.block is not None, "dense formats have no scales"
        high, wide = (size or extent for size, extent in zip(self.block, (rows, columns), strict=True))
        return -(-rows // high), -(-columns // wide)


FORMATS: dict[str, Format] = {"dense": Format("dense")}
"""Every format there is, by name; `fp8` and `mxfp4` add those that they are asked for."""


def fp8(block: tuple[int, int] = (128, 128), scale: str = "float32", activations: str | None = "dynamic") -> Format:
    """e4m3 with one scale a block.

    Args:
        block: (rows, columns); (0, 0): one scale a matrix.
        scale: "float32" or "e8m0".
        activations: "dynamic", "static", or None for weights only.

    >>> fp8().name, fp8((0, 0), activations="static").name, fp8((1, 32), "e8m0", None).name
    ('fp8', 'fp8_tensor_static', 'fp8_1x32_e8m0_weights')
    """
    high, wide = block
    shape = {(128, 128): "", (0, 0): "_tensor"}.get((high, wide), f"_{high}x{wide}")
    return _known(
        Format("fp8" + shape + _suffix(scale, "float32", activations, "dynamic"), 8, block, scale, activations)
    )


def mxfp4(scale: str = "e8m0", activations: str | None = None) -> Format:
    """e2m1 with one scale per row and 32 columns.

    Args:
        scale: "e8m0" or "float32".
        activations: None for weights only, "dynamic" or "static".

    >>> mxfp4().name, mxfp4(activations="dynamic").name
    ('mxfp4', 'mxfp4_dynamic')
    """
    return _known(Format("mxfp4" + _suffix(scale, "e8m0", activations, None), 4, (1, 32), scale, activations))


def _suffix(scale: str, usual_scale: str, activations: str | None, usual_activations: str | None) -> str:
    return ("" if scale == usual_scale else f"_{scale}") + (
        "" if activations == usual_activations else f"_{activations or 'weights'}"
    )


def _known(format: Format) -> Format:
    return FORMATS.setdefault(format.name, format)


for _scale in ("float32", "e8m0"):
    fp8(scale=_scale)
    fp8(scale=_scale, activations=None)
    mxfp4(scale=_scale)
    mxfp4(scale=_scale, activations="dynamic")
for _activations in ("dynamic", "static", None):
    fp8((0, 0), activations=_activations)
