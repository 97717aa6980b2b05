"""Gates inside kernels, and their derivatives: `core.activation.Activation` in fp32, from compile-time numbers."""

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


@triton.jit
def apply_gate_with_slopes(
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
    """What apply_gate gives, and its derivatives by gate and by up; at the very limit of a clamp they pass."""
    linear = gate
    if LIMIT is not None and not LIMIT_AFTER:
        linear = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    value, slope = _value_and_slope(linear, KIND, ALPHA, GATE_CAP)
    if LIMIT is not None:
        if LIMIT_AFTER:
            slope = tl.where(value > LIMIT, 0.0, slope)
            value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        else:
            slope = tl.where(gate > LIMIT, 0.0, slope)
    up_slope = value
    if GATED:
        factor = up
        if LIMIT is not None:
            up_slope = tl.where(tl.abs(up) > LIMIT, 0.0, up_slope)
            factor = tl.maximum(factor, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
            factor = tl.minimum(factor, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if UP_CAP is not None:
            bent = _tanh(factor / UP_CAP)
            factor = UP_CAP * bent
            up_slope *= 1 - bent * bent
        factor += UP_OFFSET
        value *= factor
        slope *= factor
    return value, slope, up_slope


@triton.jit
def _value_and_slope(x, KIND: tl.constexpr, ALPHA: tl.constexpr, GATE_CAP: tl.constexpr):
    """f(x) and f'(x)."""
    if KIND == "silu":
        sigmoid = 1 / (1 + tl.exp(-ALPHA * x))
        if GATE_CAP is not None:
            bent = _tanh(x / GATE_CAP)
            value = GATE_CAP * bent * sigmoid
            slope = (1 - bent * bent) * sigmoid + ALPHA * value * (1 - sigmoid)
        else:
            value = x * sigmoid
            slope = sigmoid + ALPHA * value * (1 - sigmoid)
    elif KIND == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh":
        bent = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        value = 0.5 * x * (1 + bent)
        # where the second term is 0 its square may overflow
        near = tl.minimum(tl.maximum(x, -16.0), 16.0)
        rise = 0.7978845608028654 * (1 + 0.134145 * near * near)
        slope = 0.5 * (1 + bent) + 0.5 * near * (1 - bent * bent) * rise
    elif KIND == "relu":
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu2":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = positive * positive
        slope = 2 * positive
    elif KIND == "sigmoid":
        value = 1 / (1 + tl.exp(-x))
        slope = value * (1 - value)
    else:
        tl.static_assert(KIND == "identity")
        value = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return value, slope
