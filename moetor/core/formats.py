"""How the numbers of one stack of experts are stored.

A format is data: backends read it in `why_not`, quantisation reads it to encode and decode. A
Weight carries its name, since torch.compile traces strings and not objects of ours as defaults.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store weights.

    Attributes:
        name: as in tables, errors and `moetor doctor`.
        bits: bits an element takes, without its scale; 0 means "those of the tensor's dtype".
        block: (rows, columns) that share one scale; 0 means the whole extent. None: no scales.
        activation_scheme: how activations are rounded before a product: None (not at all),
            "dynamic" (per token and 128 columns) or "static" (one given scale).
    """

    name: str
    bits: int = 0
    block: tuple[int, int] | None = None
    activation_scheme: str | None = None

    @property
    def quantized(self) -> bool:
        """Whether the stored numbers need scales to mean anything."""
        return self.block is not None


FORMATS: dict[str, Format] = {"dense": Format("dense")}
