"""Experts that are modules of their own become views of one stack, and stay the parameters they were."""

import copy
import io
import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import moetor
from moetor import BackendRefused, ExpertsInterface, ExpertWeights, InvalidInput, Weight
from moetor.core.interface import Call
from moetor.core.stacking import joined

E, H, I, T, K = 5, 16, 12, 7, 2


class Expert(nn.Module):
    def __init__(self, hidden: int = H, inner: int = I) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner)
        self.w3 = nn.Linear(hidden, inner)
        self.w2 = nn.Linear(inner, hidden)


class Block(nn.Module):
    """Somebody's own block of experts, without transformers."""

    def __init__(self, hidden: int = H, inner: int = I) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(E))

    def weights(self) -> ExpertWeights:
        def of(name: str) -> Weight:
            linears = [getattr(expert, name) for expert in self.experts]
            return Weight.of([linear.weight for linear in linears], [linear.bias for linear in linears])

        return ExpertWeights((of("w1"), of("w3")), of("w2"))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor, backend: str = "auto") -> Tensor:
        return moetor.experts_forward(self.weights(), x, index, weights, backend)


def a_call() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(T, H), torch.rand(T, E).topk(K).indices, torch.rand(T, K)


def results(block: Block, call: tuple[Tensor, Tensor, Tensor], backend: str) -> dict[str, Tensor]:
    """The output and every gradient."""
    block.zero_grad()
    out = block(*call, backend)
    out.square().sum().backward()
    return {"output": out.detach(), **{name: p.grad.clone() for name, p in block.named_parameters()}}


@pytest.mark.parametrize("backend", ["eager", "grouped_mm", "batched_mm"])
def test_stacked_experts_give_results_and_gradients_of_the_list(backend):
    block, call = Block(), a_call()
    expected = results(block, call, "eager")
    found = results(moetor.stack_experts(block), call, backend)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", "fused"])
def test_backends_that_need_a_stack_name_what_makes_it(backend):
    weights = Block().weights()
    call = Call(T, K, H, torch.float32, torch.device("cuda" if backend == "fused" else "cpu"))
    reason = ExpertsInterface[backend].why_not(weights, call)
    assert (
        reason == "needs the experts' weights in one tensor, got a list; moetor.stack_experts(model) puts them into one"
    )
    if backend != "fused":
        with pytest.raises(BackendRefused, match=r"moetor.stack_experts\(model\)"):
            moetor.experts_forward(weights, *a_call(), backend)


def test_parameters_stay_the_same_objects_with_the_same_names_and_values():
    block = Block()
    before, values = dict(block.named_parameters()), copy.deepcopy(block.state_dict())
    assert moetor.stack_experts(block) is block
    after = dict(block.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(value, values[name]) for name, value in block.state_dict().items())
    assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in after.values())


def test_stack_is_a_view_that_sees_what_an_optimizer_writes():
    block, call = Block(), a_call()
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)  # made before: the parameters are the same
    moetor.stack_experts(block)
    plain = Block()
    plain.load_state_dict(block.state_dict())
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        for each, steps, backend in ((block, optimizer, "grouped_mm"), (plain, other, "eager")):
            results(each, call, backend)
            steps.step()
    assert block.weights().stacked
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(block.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def test_gate_and_up_lie_side_by_side():
    block = moetor.stack_experts(Block())
    rows = [matrix for expert in block.experts for matrix in (expert.w1.weight, expert.w3.weight)]
    both = joined(rows)
    assert both is not None
    assert both.view(E, 2 * I, H).is_contiguous()


def test_matrices_of_one_shape_are_told_apart():
    block, call = Block(H, H), a_call()
    expected = results(block, call, "eager")
    found = results(moetor.stack_experts(block), call, "grouped_mm")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_frozen_experts_get_no_gradient():
    block = moetor.stack_experts(Block())
    block.experts[1].requires_grad_(False)
    out = block(torch.randn(T, H), torch.arange(T)[:, None] % E, torch.ones(T, 1), "grouped_mm")
    out.sum().backward()
    assert block.experts[1].w1.weight.grad is None
    assert block.experts[0].w1.weight.grad.any()


@pytest.mark.parametrize(
    "move_apart",
    [
        lambda block: block.double(),
        copy.deepcopy,
        lambda block: (block.load_state_dict(Block().state_dict(), assign=True), block)[1],
    ],
    ids=["to another dtype", "deepcopy", "load_state_dict(assign=True)"],
)
def test_parameters_moved_apart_are_a_list_again(move_apart):
    other = move_apart(moetor.stack_experts(Block()))
    assert not other.weights().stacked
    assert moetor.stack_experts(other).weights().stacked


def test_one_parameter_replaced_is_not_overlooked():
    block = moetor.stack_experts(Block())
    block.experts[2].w2.weight = nn.Parameter(torch.zeros(H, I))
    weights = block.weights()
    assert not weights.down.stacked
    assert not weights.down.matrices()[2].any()


def test_equally_spaced_memory_of_others_is_not_taken_for_a_stack():
    # one allocation after another: the step is that of a stack, the memory is not
    room = [torch.zeros(4, 4) for _ in range(200)]
    room.sort(key=Tensor.data_ptr)
    pairs = [joined([a, b]) for a, b in itertools.pairwise(room)]
    assert pairs == [None] * len(pairs)


def test_saved_state_has_the_original_names_and_memory_once():
    block = moetor.stack_experts(Block())
    buffer = io.BytesIO()
    torch.save(block.state_dict(), buffer)
    assert len(buffer.getvalue()) < 1.5 * sum(p.nbytes for p in block.parameters()) + 20000
    buffer.seek(0)
    plain = Block()
    plain.load_state_dict(torch.load(buffer))
    call = a_call()
    torch.testing.assert_close(plain(*call, "eager"), block(*call, "grouped_mm"))


def _different(block: Block) -> Block:
    block.experts[1] = Expert(H, I + 1)
    return block


def _without_a_bias(block: Block) -> Block:
    block.experts[1].w1.register_parameter("bias", None)
    return block


def _shared(block: Block) -> Block:
    block.experts[1] = block.experts[0]
    return block


def _not_plain(block: Block) -> Block:
    block.experts[1].w1.weight = type("Packed", (nn.Parameter,), {})(torch.zeros(I, H))
    return block


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "needs a ModuleList `experts` to stack, Linear has none"),
        (lambda: _different(Block()), "agree in shape"),
        (lambda: _without_a_bias(Block()), "share parameters, or have different ones"),
        (lambda: _shared(Block()), "share parameters"),
        (lambda: _not_plain(Block()), "'w1.weight' is Packed"),
        (lambda: Block().to("meta"), "on the meta device, or offloaded"),
    ],
)
def test_what_cannot_be_stacked_is_refused(make, message):
    block = make()
    before = [p.data_ptr() for p in block.parameters()]
    with pytest.raises(InvalidInput, match=message):
        moetor.stack_experts(block)
    assert [p.data_ptr() for p in block.parameters()] == before


def test_memory_is_not_doubled():
    # a process of its own, as the peak never falls
    script = """
import resource, torch, moetor
from torch import nn
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def layer(): return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))})
layers = nn.ModuleList(layer() for _ in range(8))
for p in layers.parameters(): p.data.fill_(1.0)
before = peak()
moetor.stack_experts(layers)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown_mib = float(done.stdout)
    print(f"\nstacking 8 layers of 32 MiB: the peak grew by {grown_mib:.0f} MiB")
    assert grown_mib < 2 * 32
