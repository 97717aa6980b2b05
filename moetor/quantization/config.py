"""How a checkpoint is, or is to be, quantised: what its config.json says, checked, and the formats that it means."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.errors import InvalidInput
from ..core.formats import Format, fp8, mxfp4

_SCHEMES = ("dynamic", "static", None)
_SCALES = {"float": "float32", "ue8m0": "e8m0"}
_EXPERTS = ("fp8", "fp4")


@dataclass(slots=True)
class FineGrainedFP8Config:
    """FP8 in blocks, FP8 per tensor, or FP8 with FP4 experts; transformers' object of this name says the same.

    Attributes:
        activation_scheme: "dynamic" or "static"; None: activations are not rounded.
        weight_block_size: (rows, columns) that share one scale; None: one scale a matrix.
        scale_fmt: scales are "float" (float32) or "ue8m0" (powers of two, one byte).
        expert_dtype: of experts, "fp8" or "fp4" (MXFP4, 32 columns a scale).
        dequantize: give the model back in its own dtype.
        modules_to_not_convert: names of modules that are left as they are: whole, as a prefix, as a
            suffix or as a regular expression. `ignored_layers` is another name for it.
        modules_to_convert: embeddings that a checkpoint holds in FP8 besides.

    Raises:
        InvalidInput: a value that is none of these.

    >>> config = FineGrainedFP8Config(scale_fmt="ue8m0", expert_dtype="fp4", ignored_layers=["lm_head"])
    >>> config.expert_format.name, config.linear_format.name, config.modules_to_not_convert
    ('mxfp4_dynamic', 'fp8_e8m0', ['lm_head'])
    """

    activation_scheme: str | None = "dynamic"
    weight_block_size: tuple[int, int] | None = (128, 128)
    dequantize: bool = False
    modules_to_not_convert: list[str] | None = None
    modules_to_convert: list[str] | None = None
    scale_fmt: str = "float"
    expert_dtype: str = "fp8"
    ignored_layers: list[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.modules_to_not_convert is None:
            self.modules_to_not_convert = self.ignored_layers
        self.ignored_layers = None
        if self.activation_scheme not in _SCHEMES:
            raise InvalidInput(f"activation_scheme must be one of {_SCHEMES}, got {self.activation_scheme!r}")
        if self.scale_fmt not in _SCALES:
            raise InvalidInput(f"scale_fmt must be one of {tuple(_SCALES)}, got {self.scale_fmt!r}")
        if self.expert_dtype not in _EXPERTS:
            raise InvalidInput(f"expert_dtype must be one of {_EXPERTS}, got {self.expert_dtype!r}")
        if self.weight_block_size is not None:
            block = tuple(self.weight_block_size)
            if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
                raise InvalidInput(f"weight_block_size must be two positive numbers or None, got {block}")
            self.weight_block_size = (block[0], block[1])

    @property
    def expert_format(self) -> Format:
        """Of experts."""
        if self.expert_dtype == "fp4":
            return mxfp4(_SCALES[self.scale_fmt], self.activation_scheme)
        return self.linear_format

    @property
    def linear_format(self) -> Format:
        """Of every other matrix."""
        return fp8(self.weight_block_size or (0, 0), _SCALES[self.scale_fmt], self.activation_scheme)

    @classmethod
    def of(cls, other: Any) -> "FineGrainedFP8Config":
        """From transformers' object, the entry `quantization_config` of a config.json, or one of ours.

        Raises:
            InvalidInput: it is of another method than "fp8", or holds what none of the fields can.

        >>> FineGrainedFP8Config.of({"quant_method": "fp8", "weight_block_size": [64, 64]}).linear_format.block
        (64, 64)
        """
        if isinstance(other, cls):
            return cls(**asdict(other))
        given = dict(other if isinstance(other, dict) else vars(other))
        method = given.pop("quant_method", "fp8")
        method = getattr(method, "value", method)
        if method != "fp8":
            raise InvalidInput(f"a FineGrainedFP8Config needs quant_method 'fp8', got {method!r}")
        return cls(**{name: given[name] for name in cls.__slots__ if name in given})

    def to_dict(self) -> dict[str, Any]:
        """The entry `quantization_config` of a config.json."""
        fields = asdict(self)
        del fields["ignored_layers"]
        block = self.weight_block_size
        return {**fields, "weight_block_size": None if block is None else list(block), "quant_method": "fp8"}
