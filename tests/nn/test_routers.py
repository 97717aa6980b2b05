"""Routers: the same experts and weights as transformers' router of an architecture that uses each."""

import copy

import pytest
import torch
from torch import Tensor, nn

from moetor import InvalidInput
from moetor.nn import Router, SigmoidTopKRouter, SoftmaxTopKRouter, TopKSoftmaxRouter, tokens_per_expert

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter  # noqa: E402
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter  # noqa: E402
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter  # noqa: E402
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter  # noqa: E402
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # noqa: E402

H, E, K = 16, 12, 3
SIZES = {"hidden_size": H, "num_experts_per_tok": K}
GROUPS = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "n_routed_experts": E}

CASES = {
    "mixtral": (
        lambda: SoftmaxTopKRouter(H, E, K, normalize=True),
        lambda: MixtralTopKRouter(transformers.MixtralConfig(**SIZES, num_local_experts=E)),
    ),
    "qwen2_moe": (
        lambda: SoftmaxTopKRouter(H, E, K),
        lambda: Qwen2MoeTopKRouter(transformers.Qwen2MoeConfig(**SIZES, num_experts=E, norm_topk_prob=False)),
    ),
    "qwen3_moe": (
        lambda: SoftmaxTopKRouter(H, E, K, normalize=True),
        lambda: Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**SIZES, num_experts=E, norm_topk_prob=True)),
    ),
    "olmoe": (
        lambda: SoftmaxTopKRouter(H, E, K),
        lambda: OlmoeTopKRouter(transformers.OlmoeConfig(**SIZES, num_experts=E, norm_topk_prob=False)),
    ),
    "gpt_oss": (
        lambda: TopKSoftmaxRouter(H, E, K, bias=True),
        lambda: GptOssTopKRouter(transformers.GptOssConfig(**SIZES, num_local_experts=E)),
    ),
    "deepseek_v3": (
        lambda: SigmoidTopKRouter(H, E, K, scale=2.5, num_groups=4, top_k_groups=2),
        lambda: DeepseekV3TopkRouter(transformers.DeepseekV3Config(**SIZES, **GROUPS)),
    ),
    "deepseek_v3 without normalising": (
        lambda: SigmoidTopKRouter(H, E, K, normalize=False, num_groups=2),
        lambda: DeepseekV3TopkRouter(
            transformers.DeepseekV3Config(
                **SIZES, n_routed_experts=E, n_group=2, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0
            )
        ),
    ),
    "glm4_moe": (
        lambda: SigmoidTopKRouter(H, E, K, scale=2.5, num_groups=4, top_k_groups=2),
        lambda: Glm4MoeTopkRouter(transformers.Glm4MoeConfig(**SIZES, **GROUPS)),
    ),
    "minimax_m2": (
        lambda: SigmoidTopKRouter(H, E, K),
        lambda: MiniMaxM2TopKRouter(transformers.MiniMaxM2Config(**SIZES, num_local_experts=E)),
    ),
}


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Router, nn.Module, tuple[Tensor, ...]]:
    """Our router, theirs with the same numbers, and what theirs is called with besides the hidden states."""
    ours, theirs = (make() for make in CASES[name])
    state = ours.state_dict()
    if "e_score_correction_bias" in state:
        state["e_score_correction_bias"].normal_(0, 0.2)  # in place: ours too
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not missing
    # MiniMax-M2 keeps the bias in the block around the router
    outside = (state["e_score_correction_bias"].to(dtype),) if unexpected else ()
    return ours, theirs, outside


def by_expert(index: Tensor, weights: Tensor) -> Tensor:
    """(T, E) the weight of each expert, 0 for those not chosen; top-k order is free."""
    return torch.zeros(len(index), E, dtype=weights.dtype).scatter(1, index, weights)


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights_are_those_of_transformers(name):
    ours, theirs, outside = pair(name)
    x = torch.randn(50, H)
    routing = ours(x)
    logits, weights, index = theirs(x, *outside)
    assert torch.equal(routing.top_k_index.sort(-1).values, index.sort(-1).values)
    torch.testing.assert_close(routing.logits, logits)
    torch.testing.assert_close(by_expert(*routing[:2]), by_expert(index, weights))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_transformers(name):
    ours, theirs, outside = pair(name)
    x = torch.randn(50, H)
    upstream = torch.randn(50, E)
    by_expert(*ours(x)[:2]).backward(upstream)
    _, weights, index = theirs(x, *outside)
    by_expert(index, weights).backward(upstream)
    for (own_name, own), (_, their) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(own.grad, their.grad, rtol=1e-4, atol=1e-5, msg=own_name)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_model_chooses_the_same_experts_and_keeps_weights_in_fp32(name):
    ours, theirs, outside = pair(name, torch.bfloat16)
    x = torch.randn(50, H, dtype=torch.bfloat16)
    routing = ours(x)
    logits, weights, index = theirs(x, *outside)
    if name == "minimax_m2":  # its router's logits are bfloat16, ours only where asked for
        ours.fp32_logits = False
        routing = ours(x)
    assert torch.equal(routing.logits.float(), logits.float())
    assert torch.equal(routing.top_k_index.sort(-1).values, index.sort(-1).values)
    assert routing.top_k_weights.dtype == torch.float32
    torch.testing.assert_close(by_expert(*routing[:2]), by_expert(index, weights.float()), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("leading", [(), (0,), (2, 3), (2, 0, 3)], ids=str)
def test_leading_sizes_are_kept(name, leading):
    ours, _, _ = pair(name)
    x = torch.randn(*leading, H)
    routing = ours(x)
    assert [tuple(part.shape) for part in routing] == [(*leading, K), (*leading, K), (*leading, E)]
    if x.numel():
        assert torch.equal(routing.top_k_index.view(-1, K), ours(x.view(-1, H)).top_k_index)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_float64_is_not_rounded(name):
    ours, _, _ = pair(name, torch.float64)
    x = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    assert ours(x).top_k_weights.dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: ours(x).top_k_weights, x)


def test_fp32_logits_are_fp32_inside_autocast():
    router, x = SigmoidTopKRouter(H, E, K), torch.randn(9, H)
    rounded = SoftmaxTopKRouter(H, E, K)
    exact = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).logits, exact.logits)
        assert rounded(x).logits.dtype == torch.bfloat16
    half = copy.deepcopy(router).bfloat16()
    assert half(x.bfloat16()).logits.dtype == torch.float32


@pytest.mark.parametrize("make", [SoftmaxTopKRouter, TopKSoftmaxRouter, SigmoidTopKRouter])
def test_compiles_to_one_graph_and_exports(make):
    router, x = make(H, E, K), torch.randn(2, 5, H)
    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(x), router(x), strict=True):
        torch.testing.assert_close(found, expected)
    program = torch.export.export(router, (x,), dynamic_shapes=({1: torch.export.Dim("tokens")},)).module()
    other = torch.randn(2, 9, H)
    for found, expected in zip(program(other), router(other), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [SoftmaxTopKRouter, TopKSoftmaxRouter, SigmoidTopKRouter])
def test_router_made_on_meta_is_drawn_as_the_one_made_in_place(make):
    torch.manual_seed(1)
    expected = make(H, E, K, bias=True)
    router = make(H, E, K, bias=True, device="meta").to_empty(device="cpu")
    torch.manual_seed(1)
    router.reset_parameters()
    assert expected.state_dict().keys() == router.state_dict().keys()
    for name, tensor in router.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k in [1, 12]"),
        ({"top_k": 13}, "top_k in [1, 12]"),
        ({"top_k": 2, "num_groups": 5}, "groups of equal size"),
        ({"top_k": 2, "num_groups": 4, "top_k_groups": 5}, "top_k_groups in [1, num_groups]"),
        ({"top_k": 2, "num_groups": 12}, "at least two experts"),
        ({"top_k": 5, "num_groups": 4}, "at least top_k"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_told(options, message):
    with pytest.raises(InvalidInput) as error:
        SigmoidTopKRouter(H, E, **options)
    assert message in str(error.value)


def test_correction_evens_out_who_is_chosen():
    router, x = SigmoidTopKRouter(H, E, K), torch.randn(512, H)
    with torch.no_grad():
        router.weight[0] = 0
        router.weight[1:] = 0.1 * router.weight[1:]

    def largest_share() -> float:
        counts = tokens_per_expert(router(x + 2).top_k_index, E).float()
        return (counts.max() / counts.mean()).item()

    before = largest_share()
    for _ in range(100):
        router.update_correction_bias(tokens_per_expert(router(x + 2).top_k_index, E), rate=2e-3)
    assert largest_share() < 1.5 < before
    router.reset_parameters()
    assert not router.e_score_correction_bias.any()
