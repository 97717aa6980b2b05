"""`sonicmoe` by a stand-in of its library: the contract, gradients, gates, and what it refuses."""

from dataclasses import replace

import pytest
import torch

import moetor.backends.sonicmoe as sonicmoe_backend
from moetor import Activation, ExpertsInterface, ExpertWeights, Weight, experts_forward
from moetor.core.interface import describe_call
from moetor.kernels import sonicmoe_experts
from moetor.testing import Case, check_case, contract_cases, make_inputs, runnable
from moetor.testing.cases import GATES

from .standins import register, sonicmoe, unregister

CASES = [case for case in contract_cases() if case.dtype == torch.bfloat16 and case.format == "dense"]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def standin():
    name = register(sonicmoe_backend.BACKEND, sonicmoe, "sonicmoe")
    yield name
    unregister(name, "sonicmoe")


@pytest.fixture(autouse=True)
def _with_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sonicmoe_backend, "compiles", lambda kind: True)


def refusal(weights: ExpertWeights, **changes) -> str | None:
    inputs = make_inputs(Case(dtype=torch.bfloat16))
    call = describe_call(weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    return sonicmoe_backend.why_not(weights, replace(call, device=CUDA, **changes))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract_with_gradients(standin: str, case: Case) -> None:
    inputs, reason = runnable(standin, case, "cpu")
    if inputs is None:
        pytest.skip(reason or "")
    problems, _ = check_case(standin, inputs)
    assert not problems, "; ".join(problems)


def test_tokens_without_experts_may_hold_anything(standin: str) -> None:
    inputs = make_inputs(Case(dtype=torch.bfloat16))
    ids = inputs.top_k_index.clone()
    ids[3], ids[5, 0] = torch.tensor([-1, 5]), -1
    x = inputs.hidden_states.detach().clone()
    x[3] = float("nan")
    x.requires_grad_()
    up, down = (weight.first.detach().requires_grad_() for weight in inputs.weights.all)
    out = experts_forward(ExpertWeights(Weight(up), Weight(down)), x, ids, inputs.top_k_weights, standin)
    out.sum().backward()
    assert not out[3].any()
    for tensor in (out, up.grad, down.grad, x.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_inference_stores_nothing_for_a_backward_pass(standin: str) -> None:
    inputs = make_inputs(Case(dtype=torch.bfloat16))
    arguments = (inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, standin)
    sonicmoe.calls.clear()
    experts_forward(*arguments)
    with torch.no_grad():
        experts_forward(*arguments)
    assert sonicmoe.calls == [False, True]


def test_compiles_to_one_graph_and_trains(standin: str) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(Case(dtype=torch.bfloat16, bias=True))
    up, down = inputs.weights.ups[0], inputs.weights.down
    leaves = [t.detach().requires_grad_() for t in (up.first, up.bias_EN(), down.first, down.bias_EN())]

    def call(x, routing, up, up_bias, down, down_bias):
        weights = ExpertWeights(Weight(up, up_bias), Weight(down, down_bias))
        return experts_forward(weights, x, inputs.top_k_index, routing, standin).square()

    arguments = (inputs.hidden_states, inputs.top_k_weights, *leaves)
    expected = call(*arguments)
    wanted = torch.autograd.grad(expected.sum(), arguments)
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(out, expected)
    for got, want in zip(torch.autograd.grad(out.sum(), arguments), wanted, strict=True):
        assert torch.equal(got, want)


REFUSED = {
    "gelu": "gelu is the erf form, and the library's the tanh form",
    "relu2": "got relu2",
    "sigmoid": "got sigmoid",
    "identity": "got identity",
    "quick_gelu": "got silu with alpha=1.702",
    "gpt_oss": "got silu with limit=0.5, alpha=1.702, up_offset=1.0",
    "limit": "got silu with limit=0.5",
    "limit_after": "got silu with limit=0.2",
    "softcap": "got silu with gate_softcap=0.7, up_softcap=0.5",
    "custom": "got a model's own gate function",
}


@pytest.mark.parametrize("gate", [*GATES, "custom"])
def test_other_gates_are_refused_by_the_name_of_the_option(gate: str) -> None:
    reason = refusal(make_inputs(Case(dtype=torch.bfloat16, gate=gate)).weights)
    if gate in sonicmoe_experts.GATES:
        assert reason is None
    else:
        assert reason is not None
        assert reason.endswith(REFUSED[gate])


def test_relu_is_refused_where_the_build_has_none(standin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sonicmoe_backend, "compiles", lambda kind: kind != "relu")
    weights = make_inputs(Case(dtype=torch.bfloat16, gate="relu")).weights
    assert refusal(weights) == "has no relu gate in the build that is loaded, stand-in of sonicmoe"
    assert refusal(replace(weights, activation=Activation("silu"))) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "needs bfloat16, got torch.float16"),
        ({"format": "fp8"}, "needs dense weights, got fp8"),
        ({"gated": False, "gate": "silu"}, "needs experts with a gate, got none"),
        ({"layout": "pair"}, "needs gate and up in one tensor, got two"),
        ({"layout": "transposed"}, "needs the experts' matrices one after another in rows, got other strides"),
        ({"layout": "unaligned"}, "needs matrices that begin at a multiple of 16 bytes, got others"),
        ({"hidden": 60}, "needs matrices of multiples of 8 rows and columns, got 64 × 60"),
        ({"norm": True}, "cannot fuse a norm after the second product"),
    ],
    ids=str,
)
def test_what_it_cannot_honour_is_refused(changes: dict, reason: str) -> None:
    case = replace(Case(dtype=torch.bfloat16), **changes)
    assert refusal(make_inputs(case).weights, dtype=case.dtype) == reason


def test_auto_never_chooses_it() -> None:
    weights = make_inputs(Case(dtype=torch.bfloat16, gate="gpt_oss", bias=True)).weights
    inputs = make_inputs(Case(dtype=torch.bfloat16))
    call = describe_call(weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    assert ExpertsInterface.select(weights, call, "auto").name == "fused"
