"""Experts of real models by name: sizes, gate and storage of one layer, as data.

Letters: E experts, K experts per token, H hidden size, I intermediate size of one expert.
"""

from dataclasses import dataclass

from ..core.activation import SILU, Activation
from ..core.errors import InvalidInput, unknown_name

GATES: dict[str, Activation] = {
    "silu": SILU,
    "gpt_oss": Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer of routed experts.

    Attributes:
        name: short, as in tables and options.
        model: whose layer it is.
        experts, top_k, hidden, intermediate: E, K, H, I.
        gate: a key of `GATES`.
        bias: both products have one.
        interleaved: rows of the first product are gate, up, gate, up …
        transposed: both are stored (in, out).
        fp32_routing: the model's router hands over fp32 weights, not the dtype of hidden_states.
    """

    name: str
    model: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    gate: str = "silu"
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False
    fp32_routing: bool = False

    @property
    def activation(self) -> Activation:
        return GATES[self.gate]

    @property
    def plain(self) -> bool:
        """Whether it is silu(gate) · up, concatenated, (out, in), without biases: what every peer can run."""
        return self.gate == "silu" and not (self.bias or self.interleaved or self.transposed)


def _gpt_oss(name: str, model: str, experts: int) -> Shape:
    return Shape(name, model, experts, 4, 2880, 2880, "gpt_oss", bias=True, interleaved=True, transposed=True)


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("Q15", "Qwen1.5-MoE-A2.7B", 60, 4, 2048, 1408),
        Shape("Q30", "Qwen3-30B-A3B", 128, 8, 2048, 768),
        Shape("MX", "Mixtral-8x7B", 8, 2, 4096, 14336, fp32_routing=True),
        _gpt_oss("GO", "gpt-oss-120b", 128),
        Shape("DS", "DeepSeek-V3", 256, 8, 7168, 2048, fp32_routing=True),
        Shape("Q235", "Qwen3-235B-A22B", 128, 8, 4096, 1536),
        Shape("Q480", "Qwen3-Coder-480B-A35B", 160, 8, 6144, 2560),
        Shape("QN80", "Qwen3-Next-80B-A3B", 512, 10, 2048, 512),
        Shape("MX22", "Mixtral-8x22B", 8, 2, 6144, 16384, fp32_routing=True),
        _gpt_oss("GO20", "gpt-oss-20b", 32),
        Shape("DSL", "DeepSeek-V2-Lite", 64, 6, 2048, 1408, fp32_routing=True),
        Shape("OLMOE", "OLMoE-1B-7B", 64, 8, 2048, 1024),
        Shape("GLM", "GLM-4.5", 160, 8, 5120, 1536, fp32_routing=True),
        Shape("GLMA", "GLM-4.5-Air", 128, 8, 4096, 1408, fp32_routing=True),
        Shape("PHI", "Phi-3.5-MoE", 16, 2, 4096, 6400),
        Shape("GR1", "Granite-3.0-1B-A400M", 32, 8, 1024, 512),
        Shape("GR3", "Granite-3.0-3B-A800M", 40, 8, 1536, 512),
    )
}


def parse_shapes(text: str) -> list[Shape]:
    """Names separated by commas, or the four numbers E,K,H,I.

    >>> [shape.model for shape in parse_shapes("Q15,MX")]
    ['Qwen1.5-MoE-A2.7B', 'Mixtral-8x7B']
    >>> parse_shapes("8,2,256,512")[0].name
    'E8-K2-H256-I512'
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 4 and all(part.isdecimal() for part in parts):
        E, K, H, I = map(int, parts)
        if not 1 <= K <= E or not H or not I:
            raise InvalidInput(f"a shape E,K,H,I needs 1 ≤ K ≤ E and sizes of at least 1, got {text}")
        return [Shape(f"E{E}-K{K}-H{H}-I{I}", "given sizes", E, K, H, I)]
    if not parts:
        raise InvalidInput(f"needs at least one shape, got {text!r}; known: {', '.join(SHAPES)}")
    for part in parts:
        if part not in SHAPES:
            raise unknown_name("shape", part, SHAPES)
    return [SHAPES[part] for part in parts]
