"""The products of `fused` on a CPU, by each of the ways that it chooses between."""

import pytest
import torch
from torch import Tensor

from moetor.kernels.fused_experts_cpu.products import describe, multiply
from moetor.testing import relative_error

N, K = 96, 1024  # large enough for oneDNN
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float64: 1e-14}


def stack(layout: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if layout == "transposed":
        return torch.randn(3, K, N, generator=generator).to(dtype).transpose(1, 2)
    if layout == "every other row":
        return torch.randn(3, 2 * N, K, generator=generator).to(dtype)[:, ::2]
    return torch.randn(3, N, K, generator=generator).to(dtype)


@pytest.mark.parametrize("rows", [1, 4, 12, 16, 30, 33, 48, 64, 68])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every other row"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_product_is_right_for_any_number_of_rows(rows: int, layout: str, dtype: torch.dtype, bias: bool) -> None:
    w, x = stack(layout, dtype), torch.randn(rows + 1, K).to(dtype)
    bias_EN = torch.randn(3, N).to(dtype) if bias else None
    out = torch.full((rows + 1, N), torch.nan, dtype=dtype)
    multiply([(0, 0, rows), (2, rows, rows + 1)], x, w, bias_EN, out)
    for expert, part in ((0, slice(0, rows)), (2, slice(rows, rows + 1))):
        expected = x[part].double() @ w[expert].double().t()
        if bias_EN is not None:
            expected += bias_EN[expert].double()
        assert relative_error(out[part], expected) <= LIMITS[dtype]


def test_way_is_told_by_dtype_and_strides() -> None:
    assert describe(stack("transposed", torch.float32), torch.float32) == "torch.mm"
    assert describe(stack("contiguous", torch.bfloat16), torch.bfloat16).startswith("torch.mm and, for an expert's")
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert describe(stack("contiguous", torch.float32), torch.float32) == "oneDNN"
