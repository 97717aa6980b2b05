"""The MoE block and the balance loss: what transformers' blocks give with the same numbers."""

import io

import pytest
import torch
from torch import nn

from moetor import InvalidInput
from moetor.nn import (
    MLP,
    Experts,
    MoE,
    SigmoidTopKRouter,
    SoftmaxTopKRouter,
    TopKSoftmaxRouter,
    load_balancing_loss,
    tokens_per_expert,
)
from moetor.testing import relative_error

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func  # noqa: E402
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock  # noqa: E402

H, I, E, K = 16, 24, 8, 2
SIZES = {"hidden_size": H, "num_experts_per_tok": K}


def mixtral() -> tuple[MoE, nn.Module]:
    config = transformers.MixtralConfig(**SIZES, intermediate_size=I, num_local_experts=E)
    return MoE(SoftmaxTopKRouter(H, E, K, normalize=True), Experts(E, H, I)), MixtralSparseMoeBlock(config)


def qwen2_moe() -> tuple[MoE, nn.Module]:
    config = transformers.Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=I, num_experts=E, shared_expert_intermediate_size=40, norm_topk_prob=False
    )
    shared_expert_gate = nn.Linear(H, 1, bias=False)
    ours = MoE(SoftmaxTopKRouter(H, E, K), Experts(E, H, I), MLP(H, 40), shared_expert_gate)
    return ours, Qwen2MoeSparseMoeBlock(config)


def deepseek_v3() -> tuple[MoE, nn.Module]:
    groups = {"n_group": 4, "topk_group": 2, "n_routed_experts": E, "routed_scaling_factor": 2.5}
    config = transformers.DeepseekV3Config(**SIZES, **groups, moe_intermediate_size=I, n_shared_experts=2)
    router = SigmoidTopKRouter(H, E, K, scale=2.5, num_groups=4, top_k_groups=2)
    return MoE(router, Experts(E, H, I), MLP(H, 2 * I)), DeepseekV3MoE(config)


def pair(make) -> tuple[MoE, nn.Module]:
    """Our block with the state dict of theirs, in which Qwen2-MoE's name for its shared expert is singular."""
    ours, theirs = make()
    for experts in (module for name, module in theirs.named_modules() if name == "experts"):
        experts.config._experts_implementation = "eager"
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(0, 0.3)
    state = {name.replace("shared_expert.", "shared_experts."): value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize("make", [mixtral, qwen2_moe, deepseek_v3])
def test_block_with_the_state_dict_of_transformers_gives_its_results_and_gradients(make):
    ours, theirs = pair(make)
    x = torch.randn(2, 9, H, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    found, expected = ours(x), theirs(y)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream)
    assert relative_error(found.detach(), expected.detach()) <= 1e-5
    assert relative_error(x.grad, y.grad) <= 1e-5
    their_gradients = {
        name.replace("shared_expert.", "shared_experts."): p.grad for name, p in theirs.named_parameters()
    }
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter.grad, their_gradients[name]) <= 1e-5, name


def test_routing_is_returned_when_asked_for():
    block, x = mixtral()[0], torch.randn(2, 9, H)
    result, routing = block(x, return_routing=True)
    assert torch.equal(result, block(x))
    assert torch.equal(routing.top_k_index, block.gate(x).top_k_index)


@pytest.mark.parametrize("leading", [(), (0,), (2, 0)], ids=str)
def test_any_leading_sizes(leading):
    block = deepseek_v3()[0]
    block(torch.randn(*leading, H)).sum().backward()
    assert block(torch.randn(*leading, H)).shape == (*leading, H)
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_autocast_keeps_the_dtype_of_its_input():
    block, x = qwen2_moe()[0], torch.randn(9, H)
    expected = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        result = block(x)
    assert result.dtype == torch.float32
    assert relative_error(result.detach(), expected.detach()) <= 3e-2


def test_compiles_to_one_graph():
    block, x = deepseek_v3()[0], torch.randn(2, 9, H)
    torch._dynamo.reset()
    found = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    assert relative_error(found.detach(), block(x).detach()) <= 1e-6


# torch 2.11 says so of its own buffers
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@torch.no_grad()
def test_exported_block_takes_any_number_of_tokens():
    block = deepseek_v3()[0]
    dims = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")},)
    program = torch.export.export(block, (torch.randn(2, 9, H),), dynamic_shapes=dims)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for sizes in ((1, 1), (3, 5)):
        x = torch.randn(*sizes, H)
        assert relative_error(loaded(x), block(x)) <= 1e-6


def test_parts_that_do_not_fit_are_told():
    with pytest.raises(InvalidInput, match="agree on num_experts, got 8 and 4"):
        MoE(TopKSoftmaxRouter(H, 8, K), Experts(4, H, I))
    with pytest.raises(InvalidInput, match="agree on hidden_size, got 8 and 16"):
        MoE(TopKSoftmaxRouter(8, E, K), Experts(E, 16, I))
    with pytest.raises(InvalidInput, match="needs shared_experts"):
        MoE(TopKSoftmaxRouter(H, E, K), Experts(E, H, I), shared_expert_gate=nn.Linear(H, 1))
    with pytest.raises(InvalidInput, match="known kinds"):
        MLP(H, I, activation=Experts(E, H, I).activation.custom(torch.sin))


def test_balance_loss_and_its_gradient_are_those_of_transformers():
    router, x = SoftmaxTopKRouter(H, E, K), torch.randn(3, 7, H)
    mask = torch.rand(3, 7) < 0.7
    for given in (None, mask):
        logits = router(x).logits.detach().requires_grad_()
        twin = logits.detach().clone().requires_grad_()
        index = router.choose(logits)[0]
        found = load_balancing_loss(logits, index, given)
        expected = load_balancing_loss_func((twin.view(-1, E),), E, K, given)
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(logits.grad, twin.grad)


def test_balance_loss_is_k_when_even_and_e_when_one_expert_has_all():
    even = torch.arange(E).view(-1, K)
    assert load_balancing_loss(torch.zeros(len(even), E), even).item() == pytest.approx(K)
    one = torch.full((5, E), -1e4).index_fill(1, torch.tensor([3]), 1e4)
    assert load_balancing_loss(one, torch.full((5, 1), 3)).item() == pytest.approx(E)


def test_ids_of_no_expert_are_not_counted():
    ids = torch.tensor([[0, 2], [-1, 2], [E, 10**6]], dtype=torch.int32)
    assert tokens_per_expert(ids, E).tolist() == [1, 0, 2, 0, 0, 0, 0, 0]
    assert tokens_per_expert(torch.empty(0, K, dtype=torch.int64), E).tolist() == [0] * E
