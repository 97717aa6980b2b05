"""Each fault that the contract is there for, planted on purpose, is found."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moetor import Backend, ExpertsInterface, InvalidInput
from moetor.core.weights import ExpertWeights, Weight
from moetor.testing import check_backend, contract_cases

Forward = Callable[[ExpertWeights, Tensor, Tensor, Tensor], Tensor]
good = ExpertsInterface["grouped_mm"].forward


def no_clamp(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(replace(w, activation=replace(w.activation, limit=None, limit_after=False)), x, ids, routing)


def no_bias(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(replace(w, down=replace(w.down, bias=None)), x, ids, routing)


def read_as_concatenated(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(replace(w, interleaved=False), x, ids, routing)


def square_taken_for_untransposed(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    """Orientation guessed from sizes: right until H = I."""
    if w.hidden_size == w.intermediate_size:
        w = replace(w, down=replace(w.down, transposed=False))
    return good(w, x, ids, routing)


def no_norm(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(replace(w, after_down=None), x, ids, routing)


def gate_too_large(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(replace(w, activation=replace(w.activation, alpha=w.activation.alpha * 1.2545)), x, ids, routing)


def sentinel_is_last_expert(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids.remainder(w.num_experts), routing)


def routing_in_bf16(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids, routing.bfloat16())


def no_weight_gradient(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w.map(torch.Tensor.detach), x, ids, routing)


def no_routing_gradient(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids, routing.detach())


def unconnected_without_tokens(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids, routing) if len(x) else x * 0


def nan_leaks_from_unwritten_rows(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    has = ((ids >= 0) & (ids < w.num_experts)).all()
    return good(w, x, ids, routing) if has else good(w, x, ids, routing) + torch.empty_like(x).fill_(torch.nan) * 0


def wrong_dtype(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids, routing).float()


def differs_from_run_to_run(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids, routing) * (1 + 1e-6 * torch.rand((), device=x.device)).to(x.dtype)


def reads_the_buffer_behind_a_view(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    def flat(weight: Weight) -> Weight:
        data = weight.data
        return (
            weight if isinstance(data, list) else replace(weight, data=torch.as_strided(data, data.shape, _dense(data)))
        )

    return good(replace(w, down=flat(w.down)), x, ids, routing)


def _dense(data: Tensor) -> tuple[int, ...]:
    return torch.empty(data.shape, device="meta").stride()


def quantized_fault(change: Callable[[ExpertWeights], ExpertWeights]) -> Forward:
    """eager on weights of which something else is told."""
    eager = ExpertsInterface["eager"].forward

    def forward(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return eager(change(w), x, ids, routing)

    forward.__name__ = change.__name__
    return forward


def _each(w: ExpertWeights, change: Callable[[Weight], Weight]) -> ExpertWeights:
    ups = tuple(change(up) for up in w.ups)
    return replace(w, up=(ups[0], ups[1]) if len(ups) == 2 else ups[0], down=change(w.down))


@quantized_fault
def scales_become_powers_of_two(w: ExpertWeights) -> ExpertWeights:
    return _each(w, lambda weight: replace(weight, scale=torch.exp2(torch.log2(weight.scale).ceil())))


@quantized_fault
def activations_are_not_rounded(w: ExpertWeights) -> ExpertWeights:
    return _each(w, lambda weight: replace(weight, format="fp8_weights"))


@quantized_fault
def activations_are_rounded_uncalled_for(w: ExpertWeights) -> ExpertWeights:
    return _each(w, lambda weight: replace(weight, format="mxfp4_dynamic"))


@quantized_fault
def nibbles_are_swapped(w: ExpertWeights) -> ExpertWeights:
    def swap(weight: Weight) -> Weight:
        byte = weight.data.view(torch.uint8)
        return replace(weight, data=(byte >> 4 | byte << 4).view(weight.data.dtype))

    return _each(w, swap)


@quantized_fault
def exponents_are_read_as_numbers(w: ExpertWeights) -> ExpertWeights:
    return _each(
        w, lambda weight: replace(weight, scale=weight.scale.view(torch.uint8).float(), format="mxfp4_float32")
    )


@quantized_fault
def interleaved_is_read_as_concatenated(w: ExpertWeights) -> ExpertWeights:
    return replace(w, interleaved=False)


@quantized_fault
def one_static_scale_for_all(w: ExpertWeights) -> ExpertWeights:
    return _each(
        w, lambda weight: replace(weight, activation_scale=weight.activation_scale[:1].expand(len(weight.data)))
    )


@quantized_fault
def blocks_in_another_order(w: ExpertWeights) -> ExpertWeights:
    return _each(w, lambda weight: replace(weight, scale=weight.scale.flip(1)))


QUANTIZED_FAULTS: dict[str, list[Forward]] = {
    "fp8": [
        scales_become_powers_of_two,
        activations_are_not_rounded,
        interleaved_is_read_as_concatenated,
        blocks_in_another_order,
    ],
    "mxfp4": [nibbles_are_swapped, exponents_are_read_as_numbers, activations_are_rounded_uncalled_for],
    "fp8_tensor_static": [one_static_scale_for_all],
}

FAULTS: list[Forward] = [
    no_clamp,
    no_bias,
    read_as_concatenated,
    square_taken_for_untransposed,
    no_norm,
    gate_too_large,
    sentinel_is_last_expert,
    routing_in_bf16,
    no_weight_gradient,
    no_routing_gradient,
    unconnected_without_tokens,
    nan_leaks_from_unwritten_rows,
    wrong_dtype,
    differs_from_run_to_run,
    reads_the_buffer_behind_a_view,
]


@pytest.fixture
def stranger() -> Iterator[Callable[[Forward], str]]:
    def register(forward: Forward) -> str:
        ExpertsInterface.register("stranger", Backend("stranger", forward, why_not=refuses_what_it_plants))
        return "stranger"

    yield register
    ExpertsInterface.unregister("stranger")


def refuses_what_it_plants(weights: ExpertWeights, call: object) -> str | None:
    if not weights.stacked:
        return "lists are not needed to find the faults"
    if weights.activation.kind == "custom":
        return "custom gates are not needed to find the faults"
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_found(fault: Forward, stranger: Callable[[Forward], str]) -> None:
    # gate_too_large can only be planted where the gate has an alpha
    kinds = ("silu", "gpt_oss") if fault is gate_too_large else None
    dtypes = (torch.bfloat16,) if fault is wrong_dtype else (torch.float32,)
    cases = [c for c in contract_cases() if c.dtype in dtypes and (kinds is None or c.gate in kinds)]
    cases = [c for c in cases if c.format == "dense"]
    with pytest.raises(AssertionError, match="FAILED"):
        check_backend(stranger(fault), cases)


@pytest.mark.parametrize(
    ("format", "fault"),
    [(format, fault) for format, faults in QUANTIZED_FAULTS.items() for fault in faults],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_fault_in_quantized_experts_is_found(
    format: str, fault: Forward, stranger: Callable[[Forward], str]
) -> None:
    layouts = ("interleaved",) if fault is interleaved_is_read_as_concatenated else ("stacked",)
    cases = [c for c in contract_cases() if c.format == format and c.layout in layouts]
    with pytest.raises(AssertionError, match="the result is off by"):
        check_backend(stranger(fault), cases)


def test_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetor.forward.OVERRIDE", "eager")
    with pytest.raises(InvalidInput, match="would run in place of 'grouped_mm'"):
        check_backend("grouped_mm", contract_cases()[:1])


def test_right_backend_passes(stranger: Callable[[Forward], str]) -> None:
    cases = [case for case in contract_cases() if case.dtype == torch.float32 and case.format == "dense"]
    report = check_backend(stranger(good), cases)
    assert report.passed > 50
    assert not report.failed
