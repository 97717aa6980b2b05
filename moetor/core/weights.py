"""One layer's expert weights and the facts about them.

Letters: E experts, H hidden size, I intermediate size; N and K are the output and input size of
one matrix. Nothing here is guessed from sizes: orientation, gate and interleaving are declared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .activation import SILU, Activation
from .errors import InvalidInput
from .formats import FORMATS
from .scales import require_fitting
from .stacking import joined

_DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Weight:
    """A stack of E matrices.

    Attributes:
        data: (E, N, K), read through its strides; (E, K, N) if `transposed`; or a list of E
            matrices, (N, K) or (K, N) each, for models that keep one module an expert; see `Weight.of`.
        bias: (E, N), or a list of E (N,), or None.
        scale: of quantised formats, (E, *scale_shape(N, K)), or a list where `data` is one.
        format: how `data` is stored, a key of `formats.FORMATS`.
        transposed: `data` is stored (in, out).
        activation_scale: (E,) float32, of formats whose activations are static.

    Quantised data is a payload (E, N, K), or (E, N, K/2) of two numbers a byte; E, N and K are
    always those of the matrices. It is frozen: backends refuse to give it gradients.
    """

    data: Tensor | list[Tensor]
    bias: Tensor | list[Tensor] | None = None
    scale: Tensor | list[Tensor] | None = None
    format: str = "dense"
    transposed: bool = False
    activation_scale: Tensor | None = None

    def __post_init__(self) -> None:
        data = self.data
        if self.format not in FORMATS:
            raise InvalidInput(f"unknown format {self.format!r} of expert weights; known: {', '.join(FORMATS)}")
        if isinstance(data, Tensor):
            if data.dim() != 3 or not data.shape[0]:
                raise InvalidInput(f"expert weights must have shape (E, out, in), got {tuple(data.shape)}")
        elif not isinstance(data, list) or not data or any(matrix.dim() != 2 for matrix in data):
            raise InvalidInput("expert weights must be one tensor, or a list of one (out, in) matrix an expert")
        elif len({(matrix.shape, matrix.dtype, matrix.device) for matrix in data}) > 1:
            raise InvalidInput("the matrices of a list of expert weights must agree in shape, dtype and device")
        self._check_bias()
        format = FORMATS[self.format]
        if format.quantized:
            require_fitting(format, data, self.scale, self.activation_scale, self.transposed)
        elif self.scale is not None or self.activation_scale is not None:
            raise InvalidInput(f"expert weights of format {self.format!r} have no scale; name the format it is of")
        elif self.first.dtype not in _DENSE_DTYPES:
            raise InvalidInput(
                f"dense expert weights must be of a float dtype of 16 bits or more, got {self.first.dtype}"
            )

    def _check_bias(self) -> None:
        if self.bias is None:
            return
        E, N = self.num_experts, self.out_features
        got = [tuple(b.shape) for b in self.bias] if isinstance(self.bias, list) else tuple(self.bias.shape)
        if got != ([(N,)] * E if isinstance(self.bias, list) else (E, N)):
            raise InvalidInput(f"expert biases must have shape (E, out) = ({E}, {N}), or be a list of it, got {got}")

    @classmethod
    def of(cls, matrices: list[Tensor], biases: list[Tensor] | None = None, *, transposed: bool = False) -> "Weight":
        """E matrices (N, K), or (K, N) if `transposed`, and E biases (N,), each a tensor of its own.

        Where they are views of one stack (`moetor.stack_experts`), it is read as one, without a
        copy, and every backend runs it; else it is a list, which `eager` runs.

        >>> import torch
        >>> Weight.of([torch.zeros(6, 4) for _ in range(3)]).stacked
        False
        >>> Weight.of(list(torch.zeros(3, 6, 4))).stacked
        True
        """
        stack = joined(matrices) if matrices else None
        bias = joined(biases) if biases else None
        return cls(matrices if stack is None else stack, biases if bias is None else bias, transposed=transposed)

    @property
    def num_experts(self) -> int:
        return len(self.data) if isinstance(self.data, list) else self.data.shape[0]

    @property
    def first(self) -> Tensor:
        """The tensor that carries dtype and device: the stack, or the list's first matrix."""
        return self.data[0] if isinstance(self.data, list) else self.data

    @property
    def out_features(self) -> int:
        return self.first.shape[-1 if self.transposed else -2]

    @property
    def in_features(self) -> int:
        columns = self.first.shape[-2 if self.transposed else -1]
        return columns if self.scale is None else columns * FORMATS[self.format].per_element

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, N and K."""
        data = self.data
        E, (rows, columns) = (len(data), data[0].shape) if isinstance(data, list) else (data.shape[0], data.shape[1:])
        if self.transposed:
            rows, columns = columns, rows
        return E, rows, columns if self.scale is None else columns * FORMATS[self.format].per_element

    @property
    def stacked(self) -> bool:
        """Whether all experts lie in one tensor."""
        return isinstance(self.data, Tensor)

    def tensors(self) -> list[Tensor]:
        """Every tensor in it, in a fixed order: data, scales, then bias."""
        return self._stored() + self.bias_tensors()

    def frozen_tensors(self) -> list[Tensor]:
        """Those that no backend gives gradients: payload and scales of a quantised format."""
        return [] if self.scale is None else self._stored()

    def bias_tensors(self) -> list[Tensor]:
        return _listed(self.bias)

    def _stored(self) -> list[Tensor]:
        tensors = list(self.data) if isinstance(self.data, list) else [self.data]
        if self.scale is not None:
            tensors += _listed(self.scale) + _listed(self.activation_scale)
        return tensors

    def stack_ENK(self) -> Tensor:
        """The stack as (E, N, K), a view; made anew at each call, so that it is never stale."""
        assert isinstance(self.data, Tensor), "a list of matrices has no stack; backends refuse it in why_not"
        return self.data.transpose(1, 2) if self.transposed else self.data

    def matrices(self) -> list[Tensor]:
        """E matrices (N, K), views.

        Through `unbind`, whose backward fills one gradient buffer; indexing the stack E times
        would make E of them.
        """
        matrices = self.data if isinstance(self.data, list) else list(self.data.unbind(0))
        return [matrix.t() for matrix in matrices] if self.transposed else matrices

    def scales(self) -> list[Tensor]:
        """The scales of each of the E matrices."""
        assert self.scale is not None, "only quantised formats have scales"
        return self.scale if isinstance(self.scale, list) else list(self.scale.unbind(0))

    def bias_EN(self) -> Tensor | None:
        """The biases in one tensor."""
        return torch.stack(self.bias) if isinstance(self.bias, list) else self.bias

    def biases(self) -> list[Tensor] | list[None]:
        """E biases (N,), or E times None."""
        if self.bias is None:
            return [None] * self.num_experts
        return self.bias if isinstance(self.bias, list) else list(self.bias.unbind(0))


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tensors in one backend's own layout, made once by its `prepare` and read by nobody else.

    Attributes:
        backend: its name.
        up, down: what it reads for each of the two products.
    """

    backend: str
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Everything about one layer's experts that a backend may know.

    Attributes:
        up: the first product. With a gate: one Weight of N = 2I rows (gate rows first, or every
            other row when `interleaved`), or a pair (gate, up) of I rows each. Without: I rows.
        down: the second product, I to H.
        activation: what happens in between.
        gated: whether `up` holds a gate.
        interleaved: rows of `up` are gate, up, gate, up …
        after_down: applied to the rows (…, H) of the second product, before the routing weight. The
            rows of float16 experts come in float32, as they may be larger than float16 allows.
        prepared: copies for one backend, see `ExpertsInterface.prepare`. A layer whose tensors are
            changed or converted must be prepared anew; `map` leaves them out.

    >>> import torch
    >>> up, down = torch.ones(4, 6, 5), torch.ones(4, 5, 3)
    >>> weights = ExpertWeights(Weight(up), Weight(down))
    >>> weights.num_experts, weights.hidden_size, weights.intermediate_size
    (4, 5, 3)
    """

    up: Weight | tuple[Weight, Weight]
    down: Weight
    activation: Activation = field(default_factory=lambda: SILU)
    gated: bool = True
    interleaved: bool = False
    after_down: Callable[[Tensor], Tensor] | None = None
    prepared: Prepared | None = None

    def __post_init__(self) -> None:
        ups = self.ups
        if not isinstance(self.activation, Activation):
            raise InvalidInput(f"activation must be a moetor.Activation, got {self.activation!r}")
        if isinstance(self.up, tuple):
            if len(ups) != 2 or len({up.out_features for up in ups}) != 1:
                raise InvalidInput(f"a pair (gate, up) must be two of I rows each, got {[u.out_features for u in ups]}")
            if not self.gated or self.interleaved:
                raise InvalidInput("a pair (gate, up) is gated and not interleaved by what it is; got other flags")
        if not self.gated and (self.interleaved or self.activation.up_offset or self.activation.up_softcap is not None):
            raise InvalidInput(
                "experts without a gate cannot interleave one, nor offset or soft-cap what it multiplies"
            )
        self._check_sizes(ups)
        self._check_storage(ups)

    # Built at every call of a layer, so both ask each tensor once.

    def _check_sizes(self, ups: "tuple[Weight, ...]") -> None:
        E, H, I = self.down.sizes
        sizes = [up.sizes for up in ups]
        rows, expected = sum([N for _, N, _ in sizes]), 2 * I if self.gated else I
        if rows != expected:
            raise InvalidInput(
                f"the first product must have {'2·I' if self.gated else 'I'} = {expected} rows for"
                f" I = {I} columns of the second, got {rows}"
            )
        for experts, _, K in sizes:
            if K != H:
                raise InvalidInput(
                    f"the first product must take H = {H} columns, as the second gives them,"
                    f" got {[up.in_features for up in ups]}"
                )
            if experts != E:
                raise InvalidInput(
                    f"both products need the same number of experts, got {[w.num_experts for w in self.all]}"
                )

    def _check_storage(self, ups: "tuple[Weight, ...]") -> None:
        down, first = self.down, self.down.first
        dtype, device = first.dtype, first.device
        for up in ups:
            other = up.first
            if other.dtype != dtype or other.device != device:
                raise InvalidInput(
                    "all weights of a layer must share dtype and device, got "
                    + ", ".join(f"{w.first.dtype} on {w.first.device}" for w in self.all)
                )
            if up.format != down.format:
                raise InvalidInput(f"all weights of a layer must be of one format, got {[w.format for w in self.all]}")
        for weight in (*ups, down):
            for bias in weight.bias_tensors()[:1] if weight.bias is not None else ():
                if bias.device != device or not bias.is_floating_point():
                    raise InvalidInput(f"biases must be floats on {device}, got {bias.dtype} on {bias.device}")

    @property
    def ups(self) -> tuple[Weight, ...]:
        """The Weights of the first product: one, or gate and up."""
        return self.up if isinstance(self.up, tuple) else (self.up,)

    @property
    def all(self) -> tuple[Weight, ...]:
        """Every Weight: those of the first product, then the second."""
        return (*self.ups, self.down)

    @property
    def num_experts(self) -> int:
        return self.down.num_experts

    @property
    def hidden_size(self) -> int:
        return self.down.out_features

    @property
    def intermediate_size(self) -> int:
        return self.down.in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.down.first.dtype

    @property
    def device(self) -> torch.device:
        return self.down.first.device

    @property
    def format(self) -> str:
        return self.down.format

    @property
    def quantized(self) -> bool:
        return FORMATS[self.down.format].quantized

    @property
    def stacked(self) -> bool:
        return all(weight.stacked for weight in self.all)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the layer, in a fixed order."""
        return [tensor for weight in self.all for tensor in weight.tensors()]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "ExpertWeights":
        """The same layer with `fn` applied to every tensor, list members and scales included; not prepared."""

        def each(part: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
            return [fn(tensor) for tensor in part] if isinstance(part, list) else fn(part)

        def one(weight: Weight) -> Weight:
            bias, scale, static = weight.bias, weight.scale, weight.activation_scale
            return replace(
                weight,
                data=each(weight.data),
                bias=None if bias is None else each(bias),
                scale=None if scale is None else each(scale),
                activation_scale=None if static is None else fn(static),
            )

        up = (one(self.up[0]), one(self.up[1])) if isinstance(self.up, tuple) else one(self.up)
        return replace(self, up=up, down=one(self.down), prepared=None)


def _listed(part: Tensor | list[Tensor] | None) -> list[Tensor]:
    return [] if part is None else part if isinstance(part, list) else [part]


def apply_gate(weights: ExpertWeights, products: tuple[Tensor, ...]) -> Tensor:
    """First product(s), (…, 2I), (…, I) or a pair of (…, I), to the input (…, I) of the second."""
    activation = weights.activation
    if activation.fn is not None:
        return activation.fn(products[0] if len(products) == 1 else torch.cat(products, dim=-1))
    if len(products) == 2:
        return activation.apply(products[0], products[1])
    (product,) = products
    if not weights.gated:
        return activation.apply(product, None)
    if weights.interleaved:
        return activation.apply(product[..., 0::2], product[..., 1::2])
    gate, up = product.chunk(2, dim=-1)
    return activation.apply(gate, up)
