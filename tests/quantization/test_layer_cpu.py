"""A whole layer of quantised experts on the CPU, as `fused` runs it: with packed bytes, dequantised, and both."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moetor import ExpertsInterface, experts_forward
from moetor.core.interface import Call
from moetor.kernels import packed_experts_cpu as packed
from moetor.quantization import layer_cpu
from moetor.testing import Case, Inputs, make_inputs, oracle, relative_error
from moetor.testing.cases import EVERYTHING

BASE = Case(dtype=torch.bfloat16, hidden=192, intermediate=160, frozen=EVERYTHING)


def run(inputs: Inputs, backend: str = "fused") -> Tensor:
    return experts_forward(
        inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
    )


@pytest.fixture(params=["as it is here", "no compiler"])
def machine(request, monkeypatch) -> str:
    if request.param == "no compiler":
        monkeypatch.setattr(packed, "available", lambda: False)
        monkeypatch.setattr(packed, "compiler", lambda: None)
    return request.param


@pytest.mark.parametrize("format", ["fp8", "fp8_tensor_static", "fp8_weights", "mxfp4", "mxfp4_dynamic"])
@pytest.mark.parametrize("case", [
    replace(BASE, tokens=1),
    replace(BASE, tokens=90, routing="one_expert", bias=True),  # an expert with more than a few rows beside others
    replace(BASE, routing="sentinels", bias=True),
    replace(BASE, layout="list"),
    replace(BASE, layout="pair"),
    replace(BASE, dtype=torch.float16),
    replace(BASE, dtype=torch.float64),
], ids=str)  # fmt: skip
def test_layer_is_right_with_and_without_a_compiler(machine: str, format: str, case: Case) -> None:
    inputs = make_inputs(replace(case, format=format))
    result = run(inputs)
    expected, _ = oracle(inputs, torch.zeros_like(result))
    assert result.dtype == case.dtype
    # the same roundings of activations as eager's and the oracle's: what is left is bfloat16's, of the result
    assert (
        relative_error(result, expected) <= {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float64: 1e-6}[case.dtype]
    )


@pytest.mark.skipif(packed.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("format", ["fp8", "fp8_tensor_static", "mxfp4"])
def test_few_rows_read_the_packed_bytes_and_many_a_dequantised_matrix(monkeypatch, format: str) -> None:
    """Rows of one expert: 1 in one call, more than a few in the other."""
    seen: list[str] = []
    for name in ("packed_rows", "dequantize"):
        owner = packed if name == "packed_rows" else layer_cpu
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, whole=whole, name=name: (seen.append(name), whole(*a))[1])
    run(make_inputs(replace(BASE, tokens=1, top_k=1, format=format)))
    assert seen == ["packed_rows"] * 2
    seen.clear()
    run(make_inputs(replace(BASE, tokens=layer_cpu.FEW_ROWS + 1, experts=1, top_k=1, format=format)))
    assert seen == ["dequantize"] * 2


def test_activations_are_rounded_as_eager_rounds_them(machine: str) -> None:
    """Bit by bit where products are exact: payload and activations of few bits, scales of one."""
    inputs = make_inputs(replace(BASE, format="fp8", dtype=torch.float32))
    got, expected = run(inputs), run(inputs, "eager")
    # without the rounding of activations it is off by 4e-2
    assert relative_error(got, expected) <= 2e-6


def test_it_says_how_it_runs(machine: str) -> None:
    inputs = make_inputs(replace(BASE, format="mxfp4"))
    call = Call(19, 2, 192, torch.bfloat16, torch.device("cpu"))
    why = str(ExpertsInterface.explain(inputs.weights, call, "auto"))
    assert ("there is no C++ compiler (CXX names one)" in why) == (
        machine == "no compiler" or packed.compiler() is None
    )
    assert "dequantised matrix at a time" in why


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_one_graph_with_and_without_tokens(format: str) -> None:
    torch._dynamo.reset()
    weights = make_inputs(replace(BASE, format=format)).weights

    def call(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts_forward(weights, x, ids, routing, "fused")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens in (0, 5):
        inputs = make_inputs(replace(BASE, tokens=tokens, format=format))
        with torch.no_grad():
            result = compiled(inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
        assert torch.equal(result, run(inputs))


def test_nothing_as_large_as_a_matrix_is_made(monkeypatch) -> None:
    """At one token, memory for rows only."""
    if packed.compiler() is None:
        pytest.skip("needs a C++ compiler")
    inputs = make_inputs(replace(BASE, tokens=1, hidden=1024, intermediate=512, format="mxfp4"))
    run(inputs)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run(inputs)
    assert max(event.cpu_memory_usage for event in seen.key_averages()) < inputs.weights.down.data[0].nbytes
