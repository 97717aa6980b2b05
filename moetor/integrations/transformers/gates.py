"""A transformers module's gate, read as data.

The classes differ in a few numbers (clamps, alpha, soft-caps) under several attribute names. The
numbers are read from the instance, every form that they allow is tried, and one is accepted only
if it gives what the module's own method gives on a grid of values. So a class that nobody has
seen is recognised when it computes a known gate, and a known name that computes another is not.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...core.activation import KINDS, Activation

# Gates differ by more than 1e-4 somewhere on the grid (gelu from its tanh form by 5e-4); some
# models compute theirs in fp32.
_TOLERANCE = 2e-6


def read_gate(module: nn.Module, *, gated: bool, interleaved: bool) -> Activation | None:
    """The module's gate as data, or None if it is not one that data describe.

    Args:
        module: has `_apply_gate(gate_up)`, or `act_fn(up)` when not gated.
        interleaved: columns of gate_up are gate, up, gate, up …; verified by the comparison.
    """
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module) and any(True for _ in act_fn.parameters()):
        return None  # a learned gate is its module's business
    with torch.no_grad(), torch.device("cpu"):
        limit = _number(module, "limit", "swiglu_limit")
        limit = None if limit == math.inf else limit
        gate, up = _grid(limit)
        try:
            if gated:
                columns = torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)
                expected = module._apply_gate(columns)  # type: ignore[operator]
            else:
                expected = act_fn(gate)  # type: ignore[misc]
        except RuntimeError:
            return None  # it wants the model's own sizes or device
        for candidate in _candidates(module, act_fn, limit, gated):
            found = candidate.apply(gate, up if gated else None)
            if found.shape != expected.shape:
                continue
            allowed = _TOLERANCE * (expected.abs() + (1 + up.abs() if gated else 1))
            if ((found - expected).abs() <= allowed).all():
                return candidate
    return None


def read_function(act_fn: Callable[[Tensor], Tensor]) -> Activation | None:
    """What f(gate) · up is as data, by f alone; None: not one that data describe."""
    if isinstance(act_fn, nn.Module) and any(True for _ in act_fn.parameters()):
        return None
    with torch.no_grad(), torch.device("cpu"):
        gate, _ = _grid(None)
        expected = act_fn(gate)
        for candidate in _plain_candidates(None):
            if ((candidate.apply(gate, None) - expected).abs() <= _TOLERANCE * (1 + expected.abs())).all():
                return candidate
    return None


def gated_by(act_fn: Callable[[Tensor], Tensor]) -> Activation:
    """act_fn(gate) · up as a model's own function; gate rows lie first."""
    return Activation.custom(functools.partial(_gate_and_multiply, act_fn))


def _gate_and_multiply(act_fn: Callable[[Tensor], Tensor], product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=-1)
    return act_fn(gate) * up


def _grid(limit: float | None) -> tuple[Tensor, Tensor]:
    """Pairs of gate and up that tell gates apart: around zero, far tails, both sides of the limit.

    The tails find a clamp that no attribute of a known name tells.
    """
    values = torch.linspace(-6, 6, 25, dtype=torch.float64)
    tails = torch.tensor([10.0, 1e2, 1e3, 1e4], dtype=torch.float64)
    values = torch.cat([values, tails, -tails])
    if limit is not None:
        values = torch.cat([values, limit * torch.tensor([-2.0, -1.1, -0.9, 0.9, 1.1, 2.0], dtype=torch.float64)])
    return values.repeat_interleave(len(values))[None], values.repeat(len(values))[None]


def _candidates(module: nn.Module, act_fn: object, limit: float | None, gated: bool) -> Iterator[Activation]:
    """Every gate that the module's numbers allow, simplest first."""
    plain = _plain_candidates(_number(module, "alpha", "swiglu_alpha"))
    yield from plain
    if not gated:
        return
    gate_cap, up_cap = _softcap(act_fn, "gate_softcap"), _softcap(act_fn, "up_softcap")
    if gate_cap is not None or up_cap is not None:
        yield Activation("silu", gate_softcap=gate_cap, up_softcap=up_cap)
    for base in plain:
        for bound in {limit, None}:
            yield replace(base, limit=bound, up_offset=1.0)
        if limit is not None:
            yield replace(base, limit=limit)
            yield replace(base, limit=limit, limit_after=True)


def _plain_candidates(alpha: float | None) -> list[Activation]:
    return [Activation(kind) for kind in KINDS] + [Activation("silu", alpha=a) for a in (1.702, alpha) if a is not None]


def _number(module: object, *names: str) -> float | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            return float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def _softcap(act_fn: object, name: str) -> float | None:
    return _number(getattr(act_fn, name, None), "softcap")
