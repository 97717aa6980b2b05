"""Registering and choosing backends."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moetor import (
    Backend,
    BackendRefused,
    BackendUnavailable,
    ExpertsInterface,
    InvalidInput,
    UnknownBackend,
    experts_forward,
)
from moetor.core.interface import Call, describe_call
from moetor.testing import Case, Inputs, make_inputs


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(Case())


@pytest.fixture
def call(inputs: Inputs) -> Call:
    return describe_call(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)


@pytest.fixture
def register() -> Iterator:
    names = []

    def one(name: str, backend) -> None:
        ExpertsInterface.register(name, backend)
        names.append(name)

    yield one
    for name in names:
        ExpertsInterface.unregister(name)


def test_bare_function_is_a_backend(register, inputs: Inputs) -> None:
    register("mine", lambda weights, x, ids, routing: x * 2)
    result = experts_forward(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, "mine")
    assert torch.equal(result, inputs.hidden_states * 2)


def test_taken_and_empty_names_are_refused(register) -> None:
    with pytest.raises(InvalidInput, match="'eager' is registered already"):
        register("eager", lambda *a: a[1])
    with pytest.raises(InvalidInput, match="non-empty string"):
        register("", lambda *a: a[1])
    with pytest.raises(InvalidInput, match="the names must agree"):
        register("other", ExpertsInterface["eager"])
    with pytest.raises(InvalidInput, match="must be a Backend or a function, got int"):
        register("number", 3)


def test_unknown_name_tells_near_ones(inputs: Inputs) -> None:
    with pytest.raises(UnknownBackend, match="unknown experts backend 'gruped_mm'; did you mean 'grouped_mm'"):
        experts_forward(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, "gruped_mm")
    assert issubclass(UnknownBackend, ValueError)


def test_machine_comes_before_call(register, inputs: Inputs, call: Call) -> None:
    eager = ExpertsInterface["eager"]
    register(
        "no_machine", replace(eager, name="no_machine", machine_why_not=lambda d: "no", why_not=lambda w, c: "never")
    )
    register("no_call", replace(eager, name="no_call", why_not=lambda w, c: f"{c.num_tokens} tokens are too many"))
    with pytest.raises(BackendUnavailable, match="'no_machine' cannot run on cpu: no"):
        ExpertsInterface.select(inputs.weights, call, "no_machine")
    with pytest.raises(BackendRefused, match="'no_call' cannot run this call: 19 tokens are too many"):
        ExpertsInterface.select(inputs.weights, call, "no_call")
    reasons = ExpertsInterface.explain(inputs.weights, call).reasons
    assert reasons["no_machine"] == "no"
    assert reasons["eager"] is None


def test_auto_goes_on_to_the_next(inputs: Inputs, call: Call) -> None:
    listed = make_inputs(Case(layout="list"))
    custom = make_inputs(Case(gate="custom"))
    assert ExpertsInterface.select(inputs.weights, call, "auto").name == "fused"
    assert ExpertsInterface.select(listed.weights, call, "auto").name == "fused"
    explanation = ExpertsInterface.explain(custom.weights, call)
    assert explanation.chosen == "grouped_mm"
    assert "fused: cannot fuse a model's own gate function" in str(explanation)
    assert "moetor.stack_experts(model)" in str(ExpertsInterface.explain(listed.weights, call))


def test_fused_says_whose_products_it_uses_on_a_cpu(inputs: Inputs, call: Call) -> None:
    explanation = ExpertsInterface.explain(inputs.weights, call)
    assert explanation.how["fused"] in ("products by oneDNN", "products by torch.mm")
    assert f"fused: can run, {explanation.how['fused']}" in str(explanation)


def test_auto_chooses_by_bytes_on_a_gpu(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetor.backends.auto.FIRST_ON_CUDA", ())  # fused, where it can run
    few = replace(call, device=torch.device("cuda"), num_tokens=1)
    many = replace(few, num_tokens=10**6)
    assert ExpertsInterface.select(inputs.weights, few, "auto").name == "batched_mm"
    assert ExpertsInterface.select(inputs.weights, many, "auto").name == "grouped_mm"


def test_backends_say_what_they_lack(inputs: Inputs, call: Call) -> None:
    capturing = replace(call, device=torch.device("cuda"), capturing=True)
    assert "cannot capture" in (ExpertsInterface["eager"].why_not(inputs.weights, capturing) or "")
    assert "cannot capture" in (ExpertsInterface["grouped_mm"].why_not(inputs.weights, capturing) or "")
    assert ExpertsInterface["batched_mm"].why_not(inputs.weights, capturing) is None
    big = replace(call, compiling=True, num_tokens=2**20)
    assert "would gather" in (ExpertsInterface["batched_mm"].why_not(inputs.weights, big) or "")
    assert "needs CPU or CUDA" in (
        ExpertsInterface["grouped_mm"].why_not(inputs.weights, replace(call, device=torch.device("mps"))) or ""
    )


def test_list_refusal_names_what_to_do(call: Call) -> None:
    listed = make_inputs(Case(layout="list"))
    for name in ("grouped_mm", "batched_mm"):
        assert "moetor.stack_experts(model)" in (ExpertsInterface[name].why_not(listed.weights, call) or "")


def test_backend_is_data(call: Call) -> None:
    assert Backend("a", print) == Backend("a", print)
    with pytest.raises(AttributeError):
        call.num_tokens = 3  # type: ignore[misc]
