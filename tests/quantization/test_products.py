"""Products of all rows with quantised experts: bounded memory, one graph, and the same as one expert at a time."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moetor import ExpertWeights, Weight, experts_forward
from moetor.quantization import gathered_product, grouped_product, products, quantize_experts, quantized_product
from moetor.testing import Case, make_inputs, oracle, relative_error

E, N, K, S = 5, 96, 160, 37


def make(format: str) -> tuple[Weight, Tensor, Tensor]:
    """A weight, rows, and their experts, sorted; expert 3 has none."""
    static = torch.rand(E) / 100 + 0.01
    dense = ExpertWeights(Weight(torch.randn(E, N, K)), Weight(torch.randn(E, K, N)), gated=False)
    weights = quantize_experts(dense, format, (static, static))
    expert_S = torch.randint(0, E, (S,))
    expert_S[expert_S == 3] = 4
    return weights.up, torch.randn(S, K).bfloat16(), expert_S.sort().values


@pytest.mark.parametrize("format", ["fp8", "fp8_tensor_static", "mxfp4"])
def test_all_ways_give_the_same_rows_and_gradients(format: str) -> None:
    weight, x, expert_S = make(format)
    ends_E = torch.searchsorted(expert_S, torch.arange(E), right=True, out_int32=True)
    one, alone = quantized_product(weight), x.clone().requires_grad_()
    expected = torch.cat([one(int(expert), alone[row : row + 1], torch.float32) for row, expert in enumerate(expert_S)])
    upstream = torch.randn(S, N)
    (expected_gradient,) = torch.autograd.grad(expected, alone, upstream)
    shuffle = torch.randperm(S)
    for product in (
        lambda x: grouped_product(x, weight, ends_E, torch.float32),
        lambda x: gathered_product(x, weight, expert_S, torch.float32, 2**30),
        lambda x: gathered_product(x, weight, expert_S, torch.float32, 1),  # one row at a time
        lambda x: gathered_product(x[shuffle], weight, expert_S[shuffle], torch.float32, 2**19)[shuffle.argsort()],
    ):
        leaf = x.clone().requires_grad_()
        out = product(leaf)
        (gradient,) = torch.autograd.grad(out, leaf, upstream)
        assert relative_error(out, expected.detach()) <= 1e-6
        assert relative_error(gradient, expected_gradient) <= 1e-3  # both rounded to bfloat16


def test_rows_behind_the_last_expert_are_zero() -> None:
    weight, x, _ = make("fp8")
    ends_E = torch.tensor([3, 3, 9, 9, 20], dtype=torch.int32)
    out = grouped_product(x, weight, ends_E, torch.float32)
    assert not out[20:].any()
    assert out[:20].any(1).all()


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.bytes = max(self.bytes, out.nbytes)
        return out


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_gathering_stays_within_its_bound(format: str) -> None:
    weight, x, expert_S = make(format)
    bytes_per_number = 9 if format == "fp8" else 6.5  # payload, the index that decodes it, and float32
    bound = int(4 * N * K * bytes_per_number)
    stored = (weight.data, weight.scale)
    with LargestTensor() as largest:  # which does not look into operators: what they run is called as it is
        rows = products._run(x, *stored, None, expert_S, format, torch.float32, bound)
        products._run_gradient(rows, *stored, expert_S, format, torch.float32, bound)
    assert 3 * N * K * 4 < largest.bytes <= 4 * N * K * 4


@pytest.mark.parametrize(("backend", "format"), [("grouped_mm", "fp8"), ("batched_mm", "mxfp4")])
def test_o2_compiles_to_one_graph_with_and_without_tokens(backend: str, format: str) -> None:
    torch._dynamo.reset()
    weights = make_inputs(Case(dtype=torch.bfloat16, format=format)).weights

    def call(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts_forward(weights, x, ids, routing, backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens in (0, 5):
        inputs = make_inputs(Case(tokens=tokens, dtype=torch.bfloat16, format=format))
        result = compiled(inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
        upstream = torch.ones_like(result)
        (gradient,) = torch.autograd.grad(result, inputs.hidden_states, upstream)
        expected, wanted = oracle(inputs, upstream)
        assert result.shape == (tokens, 64)
        assert relative_error(result, expected) <= 1e-2
        assert relative_error(gradient, wanted["hidden_states"]) <= 2e-2
