"""Check a backend against the oracle, case by case."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import forward
from ..core.errors import InvalidInput
from ..core.interface import ExpertsInterface, describe_call
from .cases import EVERYTHING, Case, Inputs, contract_cases, make_inputs, prime_memory
from .oracle import oracle, relative_error

# Relative Frobenius error of the result, by dtype. Inputs are rounded already; what is left is
# the rounding of the two products and of the result, and for fp32 the order of the sums.
LIMITS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
# Activations that are rounded to e4m3 as well turn the order of a sum into a step of it, now and then.
QUANTIZED_LIMIT = 1e-2
# A gradient passes through twice as many rounded products.
GRADIENT = 2.0


@dataclass(slots=True)
class Report:
    """What became of the cases of one backend.

    Attributes:
        passed: number of cases within the limits.
        refused: the backend's reasons, with how often each was given.
        failed: what went wrong, one line a case.
        worst: largest error of a result that passed, by dtype.
    """

    backend: str
    passed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.passed} passed, {len(self.failed)} failed, {self.refused.total()} refused"]
        lines += [f"  refused {count}: {reason}" for reason, count in self.refused.items()]
        lines += [f"  worst error in {dtype}: {error:.1e}" for dtype, error in self.worst.items()]
        lines += [f"  FAILED {line}" for line in self.failed]
        return "\n".join(lines)


def check_backend(name: str, cases: Iterable[Case] | None = None, device: torch.device | str = "cpu") -> Report:
    """Run a registered backend over the contract.

    Each case is run forward and backward, twice, in memory full of NaN: results and gradients
    must lie within the dtype's limit of a float64 loop, and the second run must repeat the
    first bit for bit. A refusal with a reason is allowed, a wrong value is not; where gradients are
    refused, the case runs without them.

    Args:
        name: in `ExpertsInterface`.
        cases: of `contract_cases()`; None: all of them.
        device: where to run.

    Returns:
        The report, if nothing failed.

    Raises:
        AssertionError: with the report, if something failed.
    """
    if forward.OVERRIDE:
        raise InvalidInput(f"MOETOR_EXPERTS={forward.OVERRIDE} would run in place of {name!r}; unset it")
    report = Report(name)
    for case in contract_cases() if cases is None else cases:
        inputs, reason = runnable(name, case, device)
        if reason is not None:
            report.refused[reason] += 1
        if inputs is None:
            continue
        problems, error = check_case(name, inputs)
        if problems:
            report.failed.append(f"[{case}] " + "; ".join(problems))
        else:
            report.passed += 1
            dtype = str(case.dtype).removeprefix("torch.")
            report.worst[dtype] = max(report.worst.get(dtype, 0.0), error)
    if report.failed:
        raise AssertionError(str(report))
    return report


def runnable(name: str, case: Case, device: torch.device | str) -> tuple[Inputs | None, str | None]:
    """The case's inputs, or, for a backend that refuses them, those without any gradient; and the reason."""
    inputs = make_inputs(case, device)
    reason = refusal(name, inputs)
    if reason is None:
        return inputs, None
    inference = make_inputs(replace(case, frozen=EVERYTHING), device)
    return (inference if refusal(name, inference) is None else None), reason


def refusal(name: str, inputs: Inputs) -> str | None:
    """The backend's reason against this call, or None."""
    call = describe_call(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    return ExpertsInterface[name].refusal(inputs.weights, call)


def check_case(name: str, inputs: Inputs) -> tuple[list[str], float]:
    """What is wrong with one backend on one call (nothing, if all is well), and the result's error."""
    case = inputs.case
    upstream = torch.randn(
        inputs.hidden_states.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    ).to(inputs.hidden_states)
    expected, expected_gradients = oracle(inputs, upstream)
    result, gradients = run(name, inputs, upstream)
    again, gradients_again = run(name, inputs, upstream)

    limit = LIMITS[case.dtype] if case.format == "dense" else max(LIMITS[case.dtype], QUANTIZED_LIMIT)
    problems = []
    if result.dtype != inputs.hidden_states.dtype:
        problems.append(f"the result is {result.dtype}, not {inputs.hidden_states.dtype}")
    error = relative_error(result, expected)
    if error > limit:
        problems.append(f"the result is off by {error:.1e}, more than {limit:.1e}")
    if not torch.equal(result, again):
        problems.append("a second run gave another result")
    limit *= GRADIENT
    total = sum(gradient.norm().item() ** 2 for gradient in expected_gradients.values()) ** 0.5
    for leaf_name, leaf in inputs.leaves().items():
        gradient = gradients[leaf_name]
        if not leaf.requires_grad:
            if gradient is not None:
                problems.append(f"{leaf_name} is frozen but got a gradient")
            continue
        if gradient is None:
            problems.append(f"{leaf_name} got no gradient")
            continue
        off = relative_error(gradient, expected_gradients[leaf_name], floor=1e-3 * total)
        if off > limit:
            problems.append(f"the gradient of {leaf_name} is off by {off:.1e}, more than {limit:.1e}")
        second = gradients_again[leaf_name]
        if second is None or not torch.equal(gradient, second):
            problems.append(f"a second run gave another gradient of {leaf_name}")
    return problems, error


def run(name: str, inputs: Inputs, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """One call and its backward pass, in memory full of NaN."""
    leaves = inputs.leaves()
    for leaf in leaves.values():
        leaf.grad = None
    prime_memory(inputs.hidden_states.device)
    result = forward.experts_forward(
        inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, name
    )
    if result.requires_grad:
        prime_memory(inputs.hidden_states.device)
        result.backward(upstream)
    return result.detach(), {name: leaf.grad for name, leaf in leaves.items()}
