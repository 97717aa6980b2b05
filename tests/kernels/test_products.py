"""Products over experts against their references."""

import pytest
import torch
from torch import Tensor

from moetor.kernels.gathered_matmul import gathered_matmul
from moetor.kernels.gathered_matmul.gradient import masked_weight_gradient
from moetor.kernels.gathered_matmul.reference import gathered_matmul as gathered_reference
from moetor.kernels.grouped_matmul import grouped_matmul, weight_gradient
from moetor.kernels.grouped_matmul.reference import grouped_matmul as grouped_reference
from moetor.testing import relative_error

S, E, N, K = 13, 4, 6, 5


@pytest.fixture
def stack() -> Tensor:
    return torch.randn(E, N, K, dtype=torch.float64)


def test_grouped_product_and_its_gradients(stack: Tensor) -> None:
    ends = torch.tensor([3, 3, 8, 11], dtype=torch.int32)
    x = torch.randn(S, K, dtype=torch.float64)
    leaves = (x.clone().requires_grad_(), stack.clone().requires_grad_())
    twins = (x.clone().requires_grad_(), stack.clone().requires_grad_())
    result = grouped_matmul(*leaves, ends, torch.float64)
    expected = grouped_reference(*twins, ends)
    assert relative_error(result[:11], expected[:11]) < 1e-14
    upstream = torch.randn_like(expected)
    upstream[11:] = 0
    for got, wanted in zip(
        torch.autograd.grad(result, leaves, upstream), torch.autograd.grad(expected, twins, upstream), strict=True
    ):
        assert relative_error(got[:11], wanted[:11]) < 1e-14


def test_gathered_product_and_its_gradients_in_chunks(stack: Tensor) -> None:
    expert_S, no_expert_S = torch.randint(0, E, (S,)), torch.arange(S) >= 11
    x = torch.randn(S, K, dtype=torch.float64)
    dirty = torch.where(no_expert_S[:, None], torch.nan, x)
    leaves = (dirty.requires_grad_(), stack.clone().requires_grad_())
    twins = (x.clone().requires_grad_(), stack.clone().requires_grad_())
    result = gathered_matmul(*leaves, expert_S, no_expert_S, torch.float64, chunk_bytes=3 * N * K * 8)
    expected = gathered_reference(*twins, expert_S.masked_fill(no_expert_S, E))
    assert relative_error(result[:11], expected[:11]) < 1e-14
    upstream = torch.randn_like(expected)
    upstream[11:] = 0
    for got, wanted in zip(
        torch.autograd.grad(result, leaves, upstream), torch.autograd.grad(expected, twins, upstream), strict=True
    ):
        assert relative_error(got[:11], wanted[:11]) < 1e-14


@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_masked_gradient_is_the_grouped_one_whatever_other_rows_hold(
    stack: Tensor, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetor.kernels.gathered_matmul.gradient._CHUNK_BYTES", chunk_bytes)
    expert_S = torch.tensor([0] * 3 + [2] * 5 + [3] * 3 + [E] * 2)
    grad, x = torch.randn(S, N, dtype=torch.float64), torch.randn(S, K, dtype=torch.float64)
    grad[11:] = x[11:] = torch.nan
    ends = torch.tensor([3, 3, 8, 11], dtype=torch.int32)
    expected = weight_gradient(grad, x, ends, stack)
    assert relative_error(masked_weight_gradient(grad, x, expert_S, E, stack.dtype), expected) < 1e-14
    assert not expected[1].any()


def test_gradient_of_transposed_weights_is_laid_out_like_them(stack: Tensor) -> None:
    stored = stack.transpose(1, 2).contiguous()
    ends = torch.tensor([3, 3, 8, 11], dtype=torch.int32)
    gradient = weight_gradient(
        torch.randn(S, N, dtype=torch.float64), torch.randn(S, K, dtype=torch.float64), ends, stored.transpose(1, 2)
    )
    assert gradient.stride() == stored.transpose(1, 2).stride()


def test_operators_pass_torch_opcheck(stack: Tensor) -> None:
    ends = torch.tensor([3, 3, 8, 11], dtype=torch.int32)
    x, grad = torch.randn(S, K, dtype=torch.float64), torch.randn(S, N, dtype=torch.float64)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moetor.grouped_matmul.default, (x, stack, ends, torch.float64), test_utils=tests)
    expert_S = torch.randint(0, E + 1, (S,))
    torch.library.opcheck(
        torch.ops.moetor.gathered_matmul_weight_gradient.default, (grad, x, expert_S, E, x.dtype), test_utils=tests
    )
    torch.library.opcheck(
        torch.ops.moetor.grouped_matmul_weight_gradient.default, (grad, x, ends, torch.float64), test_utils=tests
    )
