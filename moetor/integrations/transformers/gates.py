"""A transformers module's gate, read as data.

The classes differ in a few numbers (clamps, alpha, soft-caps) under several attribute names. The
numbers are read from the instance, every form that they allow is tried, and one is accepted only
if it gives what the module's own method gives on a grid of values. So a class that nobody has
seen is recognised when it computes a known gate, and a known name that computes another is not.
"""

from collections.abc import Iterator
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
    alpha = _number(module, "alpha", "swiglu_alpha")
    plain = [Activation(kind) for kind in KINDS]
    plain += [Activation("silu", alpha=a) for a in (1.702, alpha) if a is not None]
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
