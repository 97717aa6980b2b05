"""The cases O2 and O6 for quantised experts, over every backend; tests/test_acceptance_cases.py has the dense ones."""

import mmap
import tempfile
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moetor import ExpertWeights, Weight, experts_forward
from moetor.quantization import quantize_experts
from moetor.testing import Case, Inputs, check_case, make_inputs, oracle, prime_memory, relative_error, runnable

BACKENDS = ("auto", "fused", "grouped_mm", "batched_mm", "eager")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
with_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def inputs_for(backend: str, case: Case, device: str) -> Inputs:
    inputs, reason = runnable(backend, case, device)
    if inputs is None:
        pytest.skip(reason or "")
    return inputs


def forward(inputs: Inputs, backend: str, **changed: Tensor | ExpertWeights) -> Tensor:
    return experts_forward(
        changed.get("weights", inputs.weights),
        changed.get("x", inputs.hidden_states),
        inputs.top_k_index,
        inputs.top_k_weights,
        backend,
    )


@on_each_device
@with_each_backend
@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_o2_no_tokens_leave_exact_zeros_in_every_gradient(backend: str, format: str, device: str) -> None:
    case = Case(tokens=0, experts=8, dtype=torch.bfloat16, bias=True, format=format)
    inputs = inputs_for(backend, case, device)
    prime_memory(device)
    result = forward(inputs, backend)
    assert result.shape == (0, 64)
    if result.requires_grad:
        result.sum().backward()
    for tensor in (inputs.hidden_states, *inputs.weights.tensors()):
        assert (tensor.grad is not None) == tensor.requires_grad
        assert tensor.grad is None or (tensor.grad.shape == tensor.shape and not tensor.grad.any())
    problems, _ = check_case(backend, inputs_for(backend, replace(case, tokens=5), device))
    assert not problems


O6 = Case(tokens=33, experts=8, hidden=320, intermediate=192, dtype=torch.bfloat16, format="fp8")


def with_zeros(x: Tensor) -> Tensor:
    """Token 5 is zero, and columns 128 to 255 of token 7 are."""
    x = x.detach().clone()
    x[5], x[7, 128:256] = 0, 0
    return x


@on_each_device
@with_each_backend
@pytest.mark.parametrize("format", ["fp8", "fp8_e8m0", "fp8_tensor", "mxfp4", "mxfp4_dynamic"])
def test_o6_partial_blocks_a_zero_token_and_a_zero_block(backend: str, format: str, device: str) -> None:
    inputs = inputs_for(backend, replace(O6, format=format), device)
    inputs = replace(inputs, hidden_states=with_zeros(inputs.hidden_states))
    prime_memory(device)
    result = forward(inputs, backend)
    assert result.isfinite().all()
    assert not result[5].any()
    expected, _ = oracle(inputs, torch.zeros_like(result))
    assert relative_error(result, expected) <= 1e-2


@on_each_device
@with_each_backend
def test_o6_a_slice_of_a_larger_stack_gives_the_same(backend: str, device: str) -> None:
    """Payload and scales of one expert, alone, and as views into those of all."""
    inputs = inputs_for(backend, O6, device)
    inputs = replace(inputs, top_k_index=torch.zeros_like(inputs.top_k_index))

    def expert(weight: Weight, copy: bool) -> Weight:
        data, scale = (part[3:4].clone() if copy else part[3:4] for part in (weight.data, weight.scale))
        return replace(weight, data=data, scale=scale)

    up, down = inputs.weights.all
    view, alone = (replace(inputs.weights, up=expert(up, copy), down=expert(down, copy)) for copy in (False, True))
    assert torch.equal(forward(inputs, backend, weights=view), forward(inputs, backend, weights=alone))


def test_o6_finds_groups_that_are_divided_by_their_zero_scale() -> None:
    """The fault that O6 is for: amax / 448 of a group of zeros, with nothing under it."""

    def naive(x: Tensor) -> Tensor:
        scale = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 448
        return (x.unflatten(-1, (-1, 32)) / scale).to(torch.float8_e4m3fn).float().mul(scale).flatten(-2)

    inputs = make_inputs(replace(O6, hidden=320))
    x = with_zeros(inputs.hidden_states).float()
    assert not naive(x)[5].isfinite().all()
    assert not naive(x)[7].isfinite().all()


@on_each_device
@with_each_backend
@pytest.mark.parametrize(
    ("format", "hidden", "intermediate"),
    [("fp8", 63, 17), ("fp8", 1025, 512), ("fp8_tensor", 4, 2), ("fp8_weights", 257, 31), ("mxfp4", 96, 32)],
)
def test_o9_odd_sizes_one_byte_into_larger_buffers(
    backend: str, format: str, hidden: int, intermediate: int, device: str
) -> None:
    sizes = {"tokens": 8, "experts": 3, "hidden": hidden, "intermediate": intermediate}
    case = Case(**sizes, dtype=torch.bfloat16, format=format, layout="unaligned")
    assert inputs_for(backend, case, device).weights.down.data.data_ptr() % 2
    problems, _ = check_case(backend, inputs_for(backend, case, device))
    assert not problems


@with_each_backend
@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_o9_memory_mapped_payload_at_an_odd_place(backend: str, format: str) -> None:
    """As safetensors maps it: a file's data begin where its header ends."""
    inputs = inputs_for(backend, Case(dtype=torch.bfloat16, format=format), "cpu")
    parts = inputs.weights.tensors()
    with tempfile.TemporaryFile() as file:
        places = []
        for part in parts:
            file.write(b"\0" * (9 if part.itemsize == 1 else -file.tell() % 4))
            places.append(file.tell())
            file.write(part.view(torch.uint8).numpy().tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = iter(
            torch.frombuffer(mapped, dtype=part.dtype, count=part.numel(), offset=place).view(part.shape)
            for part, place in zip(parts, places, strict=True)
        )
        result = forward(inputs, backend, weights=inputs.weights.map(lambda _: next(tensors)))
    expected, _ = oracle(inputs, torch.ones_like(result))
    assert relative_error(result, expected) <= 1e-2


@on_each_device
@with_each_backend
def test_a_row_that_overflows_its_first_product_in_half_precision_does_not_here(backend: str, device: str) -> None:
    """Between quantised products numbers are float32: 300 · 300 columns are beyond float16, their result is not."""
    inputs_for(backend, Case(dtype=torch.float16, format="fp8"), device)
    H, I = 64, 64
    up = torch.full((1, 2 * I, H), 1.0)
    down = torch.full((1, H, I), 2.0**-20)
    weights = quantize_experts(ExpertWeights(Weight(up), Weight(down)), "fp8").map(lambda t: t.to(device))
    x = torch.full((2, H), 8.0, dtype=torch.float16, device=device)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)
    result = experts_forward(weights, x, ids, torch.ones(2, 1, device=device), backend)
    expected = 512.0 * 512.0 * I * 2.0**-20
    torch.testing.assert_close(result.float().cpu(), torch.full((2, H), expected), rtol=2e-2, atol=0.0)
