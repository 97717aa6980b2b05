"""Gates inside kernels: `core.activation.Activation.apply` in fp32, from compile-time numbers."""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    # 1 - 2 / (e^2|x| + 1) loses the low bits of small arguments; the series has them
    size = tl.abs(x)
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    large = 1 - 2 / (tl.exp(2 * size) + 1)
    return tl.where(size < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def apply_gate(
    gate,
    up,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_AFTER: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
):
    """f(gate) · (up + UP_OFFSET), or f(gate) when not GATED; fp32 blocks. NaN stays NaN, as in torch."""
    if LIMIT is not None and not LIMIT_AFTER:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "silu":
        linear = gate
        if GATE_CAP is not None:
            linear = GATE_CAP * _tanh(gate / GATE_CAP)
        out = linear / (1 + tl.exp(-ALPHA * gate))
    elif KIND == "gelu":
        out = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        out = 0.5 * gate * (1 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    elif KIND == "relu":
        out = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "relu2":
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        out = positive * positive
    elif KIND == "sigmoid":
        out = 1 / (1 + tl.exp(-gate))
    else:
        tl.static_assert(KIND == "identity")
        out = gate
    if LIMIT is not None and LIMIT_AFTER:
        out = tl.minimum(out, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if GATED:
        if LIMIT is not None:
            up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if UP_CAP is not None:
            up = UP_CAP * _tanh(up / UP_CAP)
        out = out * (up + UP_OFFSET)
    return out
