"""Calls that break things: layouts, gates, sizes, routings and dtypes, as data.

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.activation import Activation
from ..core.formats import FORMATS, fp8
from ..core.weights import ExpertWeights, Weight
from ..quantization import quantize

QUANTIZED = (
    *("fp8", "fp8_weights", "fp8_e8m0", "fp8_e8m0_weights", "fp8_tensor", "fp8_tensor_static", "fp8_tensor_weights"),
    *("mxfp4", "mxfp4_dynamic", "mxfp4_float32", "mxfp4_float32_dynamic", fp8((32, 16)).name, fp8((1, 0)).name),
)
LAYOUTS = ("stacked", "transposed", "interleaved", "pair", "strided", "unaligned", "list")
ROUTINGS = ("random", "one_expert", "empty_expert", "sentinels", "no_expert", "duplicates", "int32", "strided")

# Every tensor frozen: inference.
EVERYTHING = frozenset({"x", "weights", "routing"})

GATES: dict[str, Activation] = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu"),
    "relu2": Activation("relu2"),
    "sigmoid": Activation("sigmoid"),
    "identity": Activation("identity"),
    "quick_gelu": Activation("silu", alpha=1.702),
    "gpt_oss": Activation("silu", alpha=1.702, limit=0.5, up_offset=1.0),
    "limit": Activation("silu", limit=0.5),
    "limit_after": Activation("silu", limit=0.2, limit_after=True),
    "softcap": Activation("silu", gate_softcap=0.7, up_softcap=0.5),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call to be made, from numbers alone.

    Attributes:
        layout: how the weights are stored, one of `LAYOUTS`; quantised ones are never transposed.
        format: of the weights; quantised ones need no gradient, whatever `frozen` says.
        gate: a key of `GATES`, or "custom" for a function that no data describe.
        routing: who goes where, one of `ROUTINGS`.
        routing_dtype: of top_k_weights; None: float32, or float64 beside float64.
        frozen: tensors that need no gradient, out of "x", "weights", "routing".
    """

    tokens: int = 19
    top_k: int = 2
    experts: int = 5
    hidden: int = 64
    intermediate: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "stacked"
    format: str = "dense"
    gate: str = "silu"
    gated: bool = True
    bias: bool = False
    norm: bool = False
    routing: str = "random"
    routing_dtype: torch.dtype | None = None
    frozen: frozenset[str] = frozenset()
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        names = [name for name in self.__slots__ if getattr(self, name) != getattr(default, name)]
        shown = [f"{name}={_short(getattr(self, name))}" for name in names]
        return "-".join(shown) or "base"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call; leaves that require a gradient where the case says so."""

    case: Case
    weights: ExpertWeights
    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor

    def leaves(self) -> dict[str, Tensor]:
        """Name to tensor, of everything that may get a gradient."""
        named = trainable(self.weights, self.weights.quantized)
        return {"hidden_states": self.hidden_states, "top_k_weights": self.top_k_weights, **named}


def trainable(weights: ExpertWeights, only_biases: bool) -> dict[str, Tensor]:
    """Name to tensor, of what may get a gradient in a layer; of a quantised one, its biases."""
    tensors = [t for w in weights.all for t in (w.bias_tensors() if only_biases else w.tensors())]
    return {f"weight{i}": tensor for i, tensor in enumerate(tensors)}


def contract_cases() -> list[Case]:
    """The grid that every backend is checked on: each layout with several gates, each gate, each
    size and each routing, in every dtype."""
    base = Case()
    cases = [base]
    cases += [replace(base, layout=layout, gate=gate, bias=bias) for layout in LAYOUTS for gate, bias in
              (("silu", False), ("gpt_oss", True), ("custom", True))]  # fmt: skip
    cases += [replace(base, gate=gate) for gate in GATES]
    cases += [replace(base, gated=False, gate=gate, layout=layout, bias=bias) for gate, layout, bias in
              (("relu2", "stacked", False), ("gelu", "transposed", True), ("custom", "stacked", False))]  # fmt: skip
    cases += [replace(base, norm=True, bias=bias, routing=routing) for bias in (False, True)
              for routing in ("random", "sentinels")]  # fmt: skip
    cases += [replace(base, routing=routing, bias=bias) for routing in ROUTINGS for bias in (False, True)]
    cases += [replace(base, routing="sentinels", gate="custom"), replace(base, routing="sentinels", layout="list")]
    cases += [replace(base, tokens=tokens, bias=bias) for tokens in (0, 1, 2, 256) for bias in (False, True)]
    cases += [replace(base, tokens=tokens, layout="list") for tokens in (0, 1)]
    cases += [
        replace(base, experts=1, top_k=1),
        replace(base, experts=3, top_k=3),
        replace(base, experts=8, top_k=1),
        replace(base, experts=33, top_k=8, tokens=64),
        replace(base, hidden=63, intermediate=17),
        replace(base, hidden=63, intermediate=17, layout="transposed", bias=True),
        replace(base, hidden=257, intermediate=31, layout="interleaved"),
        replace(base, hidden=4, intermediate=2),
        replace(base, hidden=64, intermediate=64, layout="transposed"),
    ]
    some = ("x", "weights", "routing", "x routing", "x weights", "x weights routing")
    cases += [replace(base, frozen=frozenset(names.split()), bias=True) for names in some]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    grid = [replace(case, dtype=dtype) for dtype in dtypes for case in dict.fromkeys(cases)]
    grid += [replace(base, dtype=dtype, routing_dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    return grid + _quantized_cases()


def _quantized_cases() -> list[Case]:
    """Every format, and two of them with each layout, size and routing that could go wrong."""
    # blocks that do not divide: 192 and 160 are one and a half, and one and a quarter, times 128
    base = Case(hidden=192, intermediate=160, dtype=torch.bfloat16)
    cases = [replace(base, format=format, dtype=dtype, bias=bias, gate=gate) for format in QUANTIZED
             for dtype, bias, gate in ((torch.bfloat16, False, "silu"), (torch.float32, True, "gpt_oss"))]  # fmt: skip
    for format in ("fp8", "mxfp4"):
        one = replace(base, format=format)
        cases += [replace(one, layout=layout, bias=True) for layout in LAYOUTS if layout != "transposed"]
        cases += [replace(one, routing=routing) for routing in ROUTINGS if routing != "random"]
        cases += [replace(one, tokens=tokens, bias=tokens == 1) for tokens in (0, 1, 2, 64)]
        cases += [replace(one, dtype=dtype) for dtype in (torch.float16, torch.float64)]
        cases += [replace(one, frozen=frozenset(names.split()), bias=True) for names in ("x", "routing", "weights")]
        cases += [
            replace(one, gate="custom"),
            replace(one, gate="relu2", gated=False, bias=True),
            replace(one, norm=True, routing="sentinels"),
            replace(one, experts=1, top_k=1),
            replace(one, experts=33, top_k=8, tokens=64, hidden=64, intermediate=32),
            replace(one, hidden=64, intermediate=32),
            replace(one, hidden=64, intermediate=32, layout="list", tokens=0),
        ]
    cases += [
        replace(base, format="fp8", hidden=63, intermediate=17),
        replace(base, format="fp8_tensor", layout="pair"),
    ]
    return cases


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Fresh tensors for a case; the same for every device."""
    generator = torch.Generator().manual_seed(case.seed + 1)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(case.dtype).to(device)

    T, K, E, H, I = case.tokens, case.top_k, case.experts, case.hidden, case.intermediate
    rows = 2 * I if case.gated else I
    up, down = normal(E, rows, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
    up_bias, down_bias = (normal(E, rows, scale=0.3), normal(E, H, scale=0.3)) if case.bias else (None, None)
    norm_weight = 1 + normal(H, scale=0.3)
    weights_grad = "weights" not in case.frozen

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(weights_grad)

    # static activation scales that leave a few of the largest numbers out
    up_static, down_static = (torch.linspace(high, high / 2, E, device=up.device) / 448 for high in (4.0, 2.0))
    if case.layout == "pair":
        biases = (None, None) if up_bias is None else up_bias.chunk(2, dim=1)
        parts = zip(up.chunk(2, dim=1), biases, strict=True)
        gate_weight, up_weight = (
            _stored(data.clone(), None if bias is None else bias.clone(), "stacked", case.format, up_static, leaf)
            for data, bias in parts
        )
        up_arg: Weight | tuple[Weight, Weight] = (gate_weight, up_weight)
    else:
        up_arg = _stored(up, up_bias, case.layout, case.format, up_static, leaf)
    down_layout = "stacked" if case.layout in ("pair", "interleaved") else case.layout
    weights = ExpertWeights(
        up_arg,
        _stored(down, down_bias, down_layout, case.format, down_static, leaf),
        activation=Activation.custom(custom_gate(case.gated)) if case.gate == "custom" else GATES[case.gate],
        gated=case.gated,
        interleaved=case.layout == "interleaved",
        after_down=_rms_norm(norm_weight) if case.norm else None,
    )
    x = normal(T, H, scale=1.0)
    if case.layout in ("strided", "unaligned"):
        x = _embed(x, case.layout)
    routing_dtype = case.routing_dtype or torch.promote_types(case.dtype, torch.float32)
    routing = torch.rand(T, K, generator=generator, dtype=torch.float64).to(routing_dtype).to(device)
    ids = _ids(case, generator).to(device)
    return Inputs(
        case,
        weights,
        x.detach().requires_grad_("x" not in case.frozen),
        _embed(ids, "strided") if case.routing == "strided" else ids,
        routing.requires_grad_("routing" not in case.frozen),
    )


def prime_memory(device: torch.device | str, sizes: tuple[int, ...] = (2**10, 2**14, 2**17, 2**20)) -> None:
    """Fill memory that the allocator will hand out next with NaN; fresh memory is zero and hides faults."""
    blocks = [torch.full((size,), float("nan"), device=device) for size in sizes for _ in range(4)]
    del blocks


def custom_gate(gated: bool):  # type: ignore[no-untyped-def]
    """A gate that no Activation describes, over the stored first product."""

    def gate(product: Tensor) -> Tensor:
        if not gated:
            return torch.sin(product)
        first, second = product.chunk(2, dim=-1)
        return torch.sin(first) * second

    return gate


def _rms_norm(weight: Tensor):  # type: ignore[no-untyped-def]
    def norm(rows: Tensor) -> Tensor:
        wide = rows.double() if rows.dtype == torch.float64 else rows.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.to(wide.dtype)).to(rows.dtype)

    return norm


def _stored(  # type: ignore[no-untyped-def]
    data: Tensor, bias: Tensor | None, layout: str, format: str, activation_scale: Tensor, leaf
) -> Weight:
    """`data` (E, N, K) and bias (E, N) in a layout and a format; what is read is a leaf or a view of one."""
    if layout == "interleaved":
        data = torch.stack(data.chunk(2, dim=1), dim=2).flatten(1, 2)
        bias = None if bias is None else torch.stack(bias.chunk(2, dim=1), dim=2).flatten(1, 2)
    if layout == "list":
        biases = None if bias is None else [leaf(one.clone()) for one in bias]
    else:
        biases = None if bias is None else leaf(bias)
    if FORMATS[format].quantized:
        parts = [_placed(part, layout) for part in quantize(data, FORMATS[format])]
        static = activation_scale if FORMATS[format].activation_scheme == "static" else None
        return Weight(parts[0], biases, parts[1], format, activation_scale=static)
    if layout == "transposed":
        return Weight(leaf(data.transpose(1, 2).contiguous()), biases, transposed=True)
    placed = _placed(data, layout)
    return Weight([leaf(one) for one in placed] if isinstance(placed, list) else leaf(placed), biases)


def _placed(data: Tensor, layout: str) -> Tensor | list[Tensor]:
    """One tensor an expert, a view into a larger buffer, or as it is."""
    if layout == "list":
        return [one.clone() for one in data]
    return _embed(data, layout) if layout in ("strided", "unaligned") else data


def _embed(tensor: Tensor, layout: str) -> Tensor:
    """The same values as a view into a larger buffer of NaN: wide strides, or one element in."""
    if (
        tensor.element_size() == 1 and tensor.dtype != torch.int8
    ):  # torch fills no float8; these bytes are numbers, too, and wrong ones
        return _embed(tensor.view(torch.int8), layout).view(tensor.dtype)
    fill = float("nan") if tensor.is_floating_point() else -99
    if layout == "unaligned":
        room = tensor.new_full((tensor.numel() + 1,), fill)[1:]
        return room.view(tensor.shape).copy_(tensor)
    last = tensor.shape[-1]
    return tensor.new_full((*tensor.shape[:-1], last + 8), fill)[..., :last].copy_(tensor)


def _ids(case: Case, generator: torch.Generator) -> Tensor:
    T, K, E = case.tokens, case.top_k, case.experts
    scores = torch.rand(T, E, generator=generator)
    if case.routing == "empty_expert":
        scores[:, E // 2] = -1.0
    ids = scores.topk(K, dim=1).indices
    if case.routing == "one_expert":
        ids[:, 0] = E - 1
        ids[:, 1:] = ids[:, 1:] % max(E - 1, 1)
    elif case.routing == "duplicates":
        ids[:, -1] = ids[:, 0]
    elif case.routing == "no_expert":
        ids = torch.full_like(ids, E)
    elif case.routing == "sentinels":
        ids[::2, 0] = -1
        ids[1::3, -1] = E
    return ids.to(torch.int32) if case.routing == "int32" else ids


def _short(value: object) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(value))
    return str(value).removeprefix("torch.")
