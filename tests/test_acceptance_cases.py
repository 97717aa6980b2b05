"""Cases from public reports of what breaks in MoE implementations, over every backend.

Each case has a number (O1, O2 …), and a planted fault that it is shown to find, at the end.
"""

import itertools
import mmap
import tempfile
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moetor
from moetor import BackendUnavailable, ExpertsInterface, ExpertWeights, InvalidInput, Weight, experts_forward
from moetor.testing import Case, Inputs, make_inputs, oracle, prime_memory, relative_error, runnable
from moetor.testing.contract import refusal, run

BACKENDS = ("auto", "fused", "grouped_mm", "batched_mm", "eager")
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
with_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def normal(*shape: int, seed: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def inputs_for(backend: str, case: Case, device: str) -> Inputs:
    """The case's inputs, without gradients for a backend that has none; skips what it refuses altogether."""
    inputs, reason = runnable(backend, case, device)
    if inputs is None:
        pytest.skip(reason or "")
    return inputs


def gradients_of(backend: str, inputs: Inputs) -> Inputs:
    """The same inputs; skips a backend that refuses gradients."""
    if reason := refusal(backend, inputs):
        pytest.skip(reason)
    return inputs


@on_each_device
@with_each_backend
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_o1_cancelling_experts_keep_the_small_remainder(backend: str, order: tuple[int, ...], device: str) -> None:
    E, H, I, T, dtype = 3, 64, 32, 16, torch.bfloat16
    up = normal(1, 2 * I, H, seed=1, dtype=dtype, device=device, scale=H**-0.5).expand(E, -1, -1).contiguous()
    down = normal(H, I, seed=2, dtype=dtype, device=device, scale=I**-0.5)
    inputs_for(backend, Case(dtype=dtype), device)
    weights = ExpertWeights(Weight(up), Weight(torch.stack([down, down / 512, -down])))
    x = normal(T, H, seed=3, dtype=dtype, device=device)
    ids = torch.tensor(order, device=device).expand(T, E)
    result = experts_forward(weights, x, ids, torch.ones(T, E, device=device), backend)
    gate, upper = (x.double() @ up[0].double().T).chunk(2, dim=-1)
    expected = F.silu(gate) * upper @ (down / 512).double().T
    assert relative_error(result, expected) <= 1e-2


@on_each_device
@with_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_o2_no_tokens_leave_exact_zeros_in_every_gradient(
    backend: str, dtype: torch.dtype, bias: bool, device: str
) -> None:
    inputs = inputs_for(backend, Case(tokens=0, experts=8, dtype=dtype, bias=bias), device)
    prime_memory(device)
    result = experts_forward(
        inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
    )
    assert result.shape == (0, 64)
    if result.requires_grad:
        result.sum().backward()
    for tensor in (inputs.hidden_states, *inputs.weights.tensors()):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            assert tensor.grad.shape == tensor.shape
            assert not tensor.grad.any()  # NaN would be true
    check_once(backend, Case(tokens=5, experts=8, dtype=dtype, bias=bias), device)


@on_each_device
@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_o2_compiled_without_tokens(backend: str, dtype: torch.dtype, device: str) -> None:
    torch._dynamo.reset()

    def call(up: Tensor, down: Tensor, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts_forward(ExpertWeights(Weight(up), Weight(down)), x, ids, routing, backend)

    compiled = torch.compile(call, fullgraph=True)
    for tokens in (0, 5):
        inputs = make_inputs(Case(tokens=tokens, experts=8, dtype=dtype), device)
        up, down = inputs.weights.tensors()
        leaves = (up, down, inputs.hidden_states)
        result = compiled(up, down, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
        upstream = torch.ones_like(result)
        gradients = torch.autograd.grad(result, leaves, upstream)
        expected, wanted = oracle(inputs, upstream)
        assert result.shape == (tokens, 64)
        assert relative_error(result, expected) <= LIMITS[dtype]
        for gradient, name in zip(gradients, ("weight0", "weight1", "hidden_states"), strict=True):
            assert relative_error(gradient, wanted[name]) <= 2 * LIMITS[dtype]


@on_each_device
@with_each_backend
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (64, 64)])
@pytest.mark.parametrize("layout", ["stacked", "transposed", "strided"])
def test_o4_square_shapes_in_both_storage_orders(
    backend: str, hidden: int, intermediate: int, layout: str, device: str
) -> None:
    check_once(backend, Case(hidden=hidden, intermediate=intermediate, experts=4, layout=layout), device)


@pytest.mark.gpu
@with_each_backend
def test_o4_views_are_not_copied(backend: str) -> None:
    E, H, I, T = 8, 1024, 1024, 4
    room = torch.randn(E, 3 * I, H + 64, device="cuda", dtype=torch.bfloat16)
    weights = ExpertWeights(Weight(room[:, : 2 * I, :H]), Weight(room[:, 2 * I :, :I].transpose(1, 2), transposed=True))
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    ids, routing = torch.zeros(T, 1, device="cuda", dtype=torch.int64), torch.ones(T, 1, device="cuda")
    with torch.no_grad():
        experts_forward(weights, x, ids, routing, backend)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        experts_forward(weights, x, ids, routing, backend)
        extra = torch.cuda.max_memory_allocated() - before
    gathered = T * 2 * I * H * 2 if backend in ("batched_mm", "auto") else 0  # what that backend is
    assert extra - gathered <= 0.05 * E * 3 * I * H * 2


@on_each_device
@with_each_backend
@pytest.mark.parametrize("frozen", [(), ("x",), ("weights",), ("routing",), ("x", "weights")], ids=str)
def test_o5_plain_sum_with_frozen_parts_and_an_empty_expert(backend: str, frozen: tuple[str, ...], device: str) -> None:
    # The gradient of a plain sum has stride 0, which grouped products refuse.
    inputs = gradients_of(backend, make_inputs(Case(tokens=9, frozen=frozenset(frozen)), device))
    ids = inputs.top_k_index.clone()
    ids[ids == 1] = 3
    inputs = replace(inputs, top_k_index=ids)
    result = experts_forward(
        inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
    )
    prime_memory(device)
    result.sum().backward()
    _, wanted = oracle(inputs, torch.ones_like(result))
    for name, leaf in inputs.leaves().items():
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            assert relative_error(leaf.grad, wanted[name]) <= 1e-5
            if name.startswith("weight"):
                assert not leaf.grad[1].any()


@on_each_device
@with_each_backend
@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("sentinel", [4, -1, 10**6, -7, 2**32 + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_o7_sentinels_add_nothing_with_dirty_memory(
    backend: str, weight: float, sentinel: int, bias: bool, device: str
) -> None:
    inputs = inputs_for(backend, Case(tokens=24, experts=4, top_k=4, bias=bias), device)
    away = torch.rand(24, 4, generator=torch.Generator().manual_seed(5)).to(device) < 0.5
    ids = torch.where(away, sentinel, inputs.top_k_index)
    routing = torch.where(away, weight, inputs.top_k_weights.detach())
    routing.requires_grad_(inputs.top_k_weights.requires_grad)
    inputs = replace(inputs, top_k_index=ids, top_k_weights=routing)
    upstream = normal(24, 64, seed=9, dtype=torch.float32, device=device)
    expected, wanted = oracle(inputs, upstream)  # knows no id but those of experts
    first, first_gradients = run(backend, inputs, upstream)
    second, second_gradients = run(backend, inputs, upstream)
    assert relative_error(first, expected) <= 3e-6
    assert torch.equal(first, second)
    for name, expected in wanted.items():
        assert first_gradients[name] is not None
        assert relative_error(first_gradients[name], expected) <= 1e-5
        assert torch.equal(first_gradients[name], second_gradients[name])


@on_each_device
@with_each_backend
@pytest.mark.parametrize("wrong", [10**6, -7, 2**32 + 1])
def test_o7_wrong_ids_are_one_error_when_checked(backend: str, wrong: int, device: str) -> None:
    inputs = inputs_for(backend, Case(tokens=4), device)
    ids = inputs.top_k_index.clone()
    ids[2, 1] = wrong
    arguments = (inputs.weights, inputs.hidden_states, ids, inputs.top_k_weights, backend)
    with moetor.debug.check_routing(), pytest.raises(InvalidInput, match=f"got {wrong} at token 2, slot 1"):
        experts_forward(*arguments)
    experts_forward(*arguments)
    ids[2, 1] = -1
    with moetor.debug.check_routing():
        experts_forward(*arguments)


@on_each_device
@with_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden", "intermediate"), [(63, 17), (1025, 512), (4, 2), (257, 31)])
def test_o9_odd_sizes_one_element_into_larger_buffers(
    backend: str, dtype: torch.dtype, hidden: int, intermediate: int, device: str
) -> None:
    case = Case(tokens=8, hidden=hidden, intermediate=intermediate, experts=3, dtype=dtype, layout="unaligned")
    check_once(backend, case, device)


@with_each_backend
def test_o9_memory_mapped_weights_at_8_mod_16(backend: str) -> None:
    inputs = inputs_for(backend, Case(dtype=torch.bfloat16, frozen=frozenset({"weights"})), "cpu")
    with tempfile.TemporaryFile() as file:
        file.write(b"\0" * 8)
        sizes = []
        for tensor in inputs.weights.tensors():
            sizes.append((file.tell(), tensor.numel(), tensor.shape))
            file.write(tensor.view(torch.uint8).numpy().tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = iter(
            [torch.frombuffer(mapped, dtype=torch.bfloat16, count=n, offset=o).view(shape) for o, n, shape in sizes]
        )
        weights = inputs.weights.map(lambda _: next(tensors))
        assert weights.down.first.data_ptr() % 16 == 8
        result = experts_forward(
            weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=backend
        )
    expected, _ = oracle(inputs, torch.ones_like(result))
    assert relative_error(result, expected) <= 1e-2


@on_each_device
@with_each_backend
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_o10_autocast_with_mixed_weights(
    backend: str, weights_dtype: torch.dtype, bias: bool, backward_inside: bool, device: str
) -> None:
    for autocast_dtype in (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16,):
        inputs = make_inputs(Case(tokens=10, experts=8, dtype=weights_dtype, bias=bias), device)
        x = inputs.hidden_states.detach().float().requires_grad_()
        inputs = gradients_of(backend, replace(inputs, hidden_states=x))
        with torch.autocast(device, dtype=autocast_dtype):
            result = experts_forward(inputs.weights, x, inputs.top_k_index, inputs.top_k_weights, backend)
            if backward_inside:
                result.sum().backward()
        if not backward_inside:
            result.sum().backward()
        assert result.dtype == torch.float32
        expected, wanted = oracle(inputs, torch.ones_like(result))
        # x and the weights are rounded to autocast's dtype, which the oracle does not do
        assert relative_error(result, expected) <= 1e-2
        for name, leaf in inputs.leaves().items():
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            assert relative_error(leaf.grad, wanted[name]) <= 2e-2


@with_each_backend
def test_o10_without_autocast_dtypes_must_agree(backend: str) -> None:
    inputs = inputs_for(backend, Case(dtype=torch.bfloat16), "cpu")
    with pytest.raises(InvalidInput, match="must have the dtype of the weights"):
        experts_forward(
            inputs.weights, inputs.hidden_states.float(), inputs.top_k_index, inputs.top_k_weights, backend=backend
        )


def test_o12_backend_of_another_machine_is_refused(needs_sm90: str) -> None:
    inputs = make_inputs(Case())
    call: Callable[[], Tensor] = lambda: experts_forward(  # noqa: E731
        inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, backend=needs_sm90
    )
    with pytest.raises(BackendUnavailable, match="'needs_sm90' cannot run on cpu: needs compute capability 9.0"):
        call()
    assert issubclass(BackendUnavailable, ImportError)


@pytest.fixture
def needs_sm90():
    def machine_why_not(device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"needs compute capability 9.0, got {device.type}"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 9 else f"needs compute capability 9.0, got {major}.{minor}"

    eager = ExpertsInterface["eager"]
    ExpertsInterface.register("needs_sm90", replace(eager, name="needs_sm90", machine_why_not=machine_why_not))
    yield "needs_sm90"
    ExpertsInterface.unregister("needs_sm90")


def check_once(backend: str, case: Case, device: str) -> None:
    """One call of a case, result and gradients, in memory full of NaN."""
    inputs = inputs_for(backend, case, device)
    upstream = normal(case.tokens, case.hidden, seed=9, dtype=case.dtype, device=device)
    expected, wanted = oracle(inputs, upstream)
    result, gradients = run(backend, inputs, upstream)
    assert relative_error(result, expected) <= LIMITS[case.dtype]
    for name, expected_gradient in wanted.items():
        assert gradients[name] is not None
        assert relative_error(gradients[name], expected_gradient) <= 2 * LIMITS[case.dtype]


def running_sum_in_bf16(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for slot in range(ids.shape[1]):
        total = total + good(w, x, ids[:, slot : slot + 1], routing[:, slot : slot + 1])
    return total


def unconnected_without_tokens(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids, routing) if len(x) else x * 0


def orientation_from_sizes(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    square = w.hidden_size == w.intermediate_size
    return good(replace(w, down=replace(w.down, transposed=False)) if square else w, x, ids, routing)


def gradient_of_stride_0_lost(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    result = good(w, x, ids, routing)
    result.register_hook(lambda grad: grad if all(grad.stride()) else grad * 0)
    return result


def sentinel_is_multiplied_by_its_weight(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids.clamp(0, w.num_experts - 1), routing)


def view_read_as_dense(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w.map(lambda t: torch.as_strided(t, t.shape, t.stride(), 0)), x, ids, routing)


def routing_weights_off_by_2_percent(w: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return good(w, x, ids, routing * 1.02)


good = ExpertsInterface["grouped_mm"].forward


@pytest.mark.parametrize(
    ("fault", "case", "arguments"),
    [
        (running_sum_in_bf16, test_o1_cancelling_experts_keep_the_small_remainder, ((0, 1, 2),)),
        (unconnected_without_tokens, test_o2_no_tokens_leave_exact_zeros_in_every_gradient, (torch.float32, False)),
        (orientation_from_sizes, test_o4_square_shapes_in_both_storage_orders, (64, 64, "transposed")),
        (gradient_of_stride_0_lost, test_o5_plain_sum_with_frozen_parts_and_an_empty_expert, ((),)),
        (sentinel_is_multiplied_by_its_weight, test_o7_sentinels_add_nothing_with_dirty_memory, (0.3, -1, False)),
        (view_read_as_dense, test_o9_odd_sizes_one_element_into_larger_buffers, (torch.float32, 63, 17)),
        (routing_weights_off_by_2_percent, test_o10_autocast_with_mixed_weights, (torch.float32, False, False)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_fault_is_found(fault: Callable[..., Tensor], case: Callable[..., None], arguments: tuple) -> None:
    ExpertsInterface.register("stranger", fault)
    try:
        with pytest.raises(AssertionError):
            case("stranger", *arguments, "cpu")
    finally:
        ExpertsInterface.unregister("stranger")
