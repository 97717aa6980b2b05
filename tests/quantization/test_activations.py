"""What a product sees of its activations."""

import pytest
import torch

from moetor.core.formats import FORMATS
from moetor.quantization import round_activations

DYNAMIC, STATIC, NONE = FORMATS["fp8"], FORMATS["fp8_tensor_static"], FORMATS["mxfp4"]


def test_dynamic_scales_are_per_row_and_128_columns() -> None:
    x = torch.randn(5, 300)
    x[:, 128:256] *= 1e4
    x[3] *= 1e-6
    for row in range(5):
        for start in (0, 128, 256):
            group = x[row, start : start + 128]
            scale = group.abs().max() / 448
            expected = (group / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(round_activations(x, DYNAMIC)[row, start : start + 128], expected)


def test_zero_rows_and_groups_stay_zero() -> None:
    x = torch.randn(8, 320)
    x[5], x[7, 128:256] = 0, 0
    rounded = round_activations(x, DYNAMIC)
    assert rounded.isfinite().all()
    assert not rounded[5].any()
    assert not rounded[7, 128:256].any()
    assert rounded[7, :128].any()


def test_a_row_depends_on_no_other_row() -> None:
    x = torch.randn(6, 200).bfloat16()
    assert torch.equal(round_activations(x, DYNAMIC)[2:3], round_activations(x[2:3], DYNAMIC))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_static_rounds_with_the_given_scale_and_saturates(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.3, 1.0, 500.0, -1e4]], dtype=dtype)
    rounded = round_activations(x, STATIC, torch.tensor(0.5), torch.float64)
    nearest = (x.float()[:, :2] / 0.5).to(torch.float8_e4m3fn).double() * 0.5
    assert torch.equal(rounded[:, :2], nearest)
    assert rounded[0, 2].item() == 224.0 == -rounded[0, 3].item()


def test_weights_only_formats_leave_activations_alone() -> None:
    x = torch.randn(3, 50).bfloat16()
    assert torch.equal(round_activations(x, NONE), x.float())


def test_nan_in_a_row_is_seen_in_that_row_only() -> None:
    x = torch.randn(3, 256)
    x[1, 7] = torch.nan
    rounded = round_activations(x, DYNAMIC)
    assert rounded[1, :128].isnan().all()
    assert rounded[1, 128:].isfinite().all()
    assert rounded[[0, 2]].isfinite().all()
