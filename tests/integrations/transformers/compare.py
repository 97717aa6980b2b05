"""How far results and gradients lie from those of a reference, relative to their norms."""

from collections.abc import Mapping

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, in float64."""
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm()).item()


def gradient_errors(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> dict[str, float]:
    """The error of each gradient, relative to the larger of its own norm and 1e-3 of the norm of all.

    Right code fails on tiny gradients otherwise: one of norm 6e-8 is all rounding. A gradient that
    only one side has counts as infinitely wrong, but for zeros found where none was expected: moetor
    gives an expert without tokens a gradient, a loop over those that have some does not.
    """
    norms = {name: grad.double().norm() for name, grad in expected.items() if grad is not None}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    errors = {}
    for name in expected.keys() | found.keys():
        mine, theirs = found.get(name), expected.get(name)
        if mine is not None and theirs is not None:
            difference = (mine.double() - theirs.double()).norm()
            errors[name] = (difference / max(norms[name], 1e-3 * total)).item()
        elif mine is not theirs and (mine is None or mine.any()):
            errors[name] = float("inf")
    return errors
