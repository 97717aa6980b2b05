"""What happens between the two products of an expert, as data.

Kernels can fuse a gate only if they can read what it is, so a gate is a few numbers here and
not a function. A model's own method that none of the numbers describe is `Activation.custom`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InvalidInput

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@dataclass(frozen=True, slots=True)
class Activation:
    """f(gate) · (up + up_offset), with clamps and soft-caps; f(up) alone for experts without a gate.

    The order is: clamp (if `limit_after` is false), soft-cap, f, clamp (if it is true), multiply.

    Attributes:
        kind: f, one of `KINDS`, or "custom".
        alpha: silu only: f(x) = x · sigmoid(alpha · x); 1.702 is the "quick gelu" and gpt-oss' gate.
        limit: gate clamped to at most this, up to ± this; None: no clamp.
        limit_after: clamp f(gate) in place of gate (step3p7).
        up_offset: added to up after its clamp; gpt-oss has 1.
        gate_softcap: c · tanh(x / c) on the *linear* factor of silu: softcap(x) · sigmoid(alpha · x)
            (inkling2); None: no soft-cap.
        up_softcap: the same for up.
        fn: custom only: the whole stored first product (S, 2I), or (S, I) without a gate, to (S, I).

    >>> import torch
    >>> gate, up = torch.tensor([[0.0, 8.0]]), torch.tensor([[1.0, 3.0]])
    >>> Activation("relu", limit=2.0).apply(gate, up)
    tensor([[0., 4.]])
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    limit_after: bool = False
    up_offset: float = 0.0
    gate_softcap: float | None = None
    up_softcap: float | None = None
    fn: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.kind != "custom" and self.kind not in KINDS:
            known = ", ".join(KINDS)
            raise InvalidInput(f"an activation must be one of {known} or Activation.custom, got {self.kind!r}")
        if (self.kind == "custom") != (self.fn is not None):
            raise InvalidInput(f"only a custom activation has a function, got kind={self.kind!r} and fn={self.fn}")
        for name in ("limit", "gate_softcap", "up_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"an activation's {name} must be positive or None, got {value}")
        if self.kind != "silu" and (self.alpha != 1.0 or self.gate_softcap is not None):
            raise InvalidInput(f"alpha and gate_softcap belong to kind 'silu', got kind={self.kind!r}")

    @classmethod
    def custom(cls, fn: Callable[[Tensor], Tensor]) -> "Activation":
        """A model's own gate: `fn` takes the stored first product as it is, (S, 2I) or (S, I)."""
        return cls("custom", fn=fn)

    @property
    def plain(self) -> bool:
        """Whether it is f(gate) · up and nothing else."""
        return (
            self.limit is None
            and not self.up_offset
            and self.alpha == 1.0
            and self.gate_softcap is None
            and self.up_softcap is None
        )

    def apply(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Apply to gate (…, I) and up (…, I), or to gate alone when experts have no gate.

        (Not `__call__`: torch 2.11 cannot trace a call of an object that was built while tracing.)

        Half precision: a plain gate runs in the dtype, as its two roundings are below those of
        the products; anything with clamps or soft-caps runs in fp32 and is rounded once.
        """
        if self.plain:
            out = KINDS[self.kind](gate)
            return out if up is None else out * up
        dtype = gate.dtype
        if dtype in (torch.float16, torch.bfloat16):
            gate, up = gate.float(), None if up is None else up.float()
        if self.limit is not None and not self.limit_after:
            gate = gate.clamp(max=self.limit)
        if self.gate_softcap is not None:
            out = _softcap(gate, self.gate_softcap) * torch.sigmoid(self.alpha * gate)
        elif self.alpha != 1.0:
            out = gate * torch.sigmoid(self.alpha * gate)
        else:
            out = KINDS[self.kind](gate)
        if self.limit is not None and self.limit_after:
            out = out.clamp(max=self.limit)
        if up is not None:
            if self.limit is not None:
                up = up.clamp(-self.limit, self.limit)
            if self.up_softcap is not None:
                up = _softcap(up, self.up_softcap)
            out = out * (up + self.up_offset if self.up_offset else up)
        return out.to(dtype)


def _softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


SILU = Activation("silu")
