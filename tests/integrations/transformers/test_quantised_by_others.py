"""Models that another library has quantised: refused by name, or left to transformers; packed bytes are never read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import moetor
from moetor import InvalidInput
from moetor.integrations.transformers.choice import experts_by_key, unreadable

from .compare import relative_error
from .models import build, logits, tokens


class Linear4bit(nn.Linear):
    """As bitsandbytes': a Linear whose weight is packed."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        packed = torch.zeros(sizes[0] * sizes[1] // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)


class QuantLinear(nn.Module):
    """As GPTQ's and AWQ's: no Linear at all."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(sizes[0] // 8, sizes[1], dtype=torch.int32))
        self.scales = nn.Parameter(torch.ones(sizes[1]))


class PackedTensor(torch.Tensor):
    """As torchao's: a tensor of another class that says it is bfloat16 and holds integers."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> "PackedTensor":
        made: PackedTensor = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "detach" in str(function) or "alias" in str(function):
            return PackedTensor(args[0].codes)
        raise AssertionError(f"{function} would have read the packed numbers")


def experts_in(model: nn.Module) -> list[Any]:
    return [module for modules in experts_by_key(model).values() for module in modules]


def with_packed_parameter(name: str, owner: str, parameter: str) -> PreTrainedModel:
    model = build(name)
    for experts in experts_in(model):
        holder = getattr(experts, owner) if owner else experts
        codes = torch.zeros(getattr(holder, parameter).shape, dtype=torch.int8)
        setattr(holder, parameter, nn.Parameter(PackedTensor(codes), requires_grad=False))
    return model


def with_bytes(name: str, parameter: str) -> PreTrainedModel:
    model = build(name)
    for experts in experts_in(model):
        packed = getattr(experts, parameter).shape
        setattr(experts, parameter, nn.Parameter(torch.zeros(packed, dtype=torch.uint8), requires_grad=False))
    return model


def with_linears(make: Callable[[int, int], nn.Module]) -> PreTrainedModel:
    model = build("old_qwen2_moe")
    for block in experts_in(model):
        for expert in block.experts:
            expert.up_proj = make(expert.up_proj.in_features, expert.up_proj.out_features)
    return model


def with_experts(make: Callable[[Any], nn.Module]) -> PreTrainedModel:
    """A gpt_oss whose experts are of another class, as quantising puts them in place."""
    model = build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts = make(model.config)
    return model


def mxfp4(config: Any) -> nn.Module:
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    return Mxfp4GptOssExperts(config)


def fp8(config: Any) -> nn.Module:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    config.hidden_act, config.moe_intermediate_size = "silu", config.intermediate_size
    return FP8Experts(config, block_size=(8, 8))


def gguf(config: Any) -> nn.Module:
    try:
        from transformers.integrations.gguf.utils import GgufExperts
    except ImportError:
        pytest.skip("this transformers has no experts in GGUF blocks")
    experts = GgufExperts.__new__(GgufExperts)
    nn.Module.__init__(experts)
    experts.gate_up_proj = experts.down_proj = nn.Parameter(torch.zeros(8, 4, 4, dtype=torch.uint8), False)
    experts.act_fn = nn.SiLU()
    return experts


QUANTISED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "MXFP4": (lambda: with_experts(mxfp4), r"^Mxfp4GptOssExperts holds MXFP4 .*Mxfp4Config\(dequantize=True\)"),
    "FP8": (lambda: with_experts(fp8), r"^FP8Experts holds FP8 .*FineGrainedFP8Config\(dequantize=True\)"),
    "GGUF": (lambda: with_experts(gguf), "^GgufExperts holds GGUF blocks"),
    "bitsandbytes": (lambda: with_linears(Linear4bit), "up_proj is no torch.nn.Linear but .*Linear4bit"),
    "GPTQ": (lambda: with_linears(QuantLinear), "up_proj is no torch.nn.Linear but .*QuantLinear"),
    "torchao, decorated experts": (
        lambda: with_packed_parameter("qwen3_moe", "", "gate_up_proj"),
        r"^Qwen3MoeExperts.gate_up_proj is a PackedTensor of",
    ),
    "torchao, dbrx": (
        lambda: with_packed_parameter("dbrx", "mlp", "w2"),
        "DbrxExpertGLU.w2 is a PackedTensor of",
    ),
    "torchao, llama4": (
        lambda: with_packed_parameter("llama4", "experts", "down_proj"),
        "Llama4TextExperts.down_proj is a PackedTensor of",
    ),
    "bytes in place of weights": (
        lambda: with_bytes("mixtral", "down_proj"),
        r"^MixtralExperts.down_proj holds packed or quantised numbers \(torch.uint8\)",
    ),
    "bytes, longcat_flash": (lambda: with_bytes("longcat_flash", "down_proj"), "LongcatFlashExperts .*torch.uint8"),
}
each = pytest.mark.parametrize(("make", "message"), QUANTISED.values(), ids=QUANTISED)


@each
def test_quantised_experts_are_refused_in_one_sentence(make, message):
    model = make()
    kind = type(model)
    with pytest.raises(InvalidInput, match=message) as caught:
        moetor.attach(model)
    assert "experts_implementation='eager' leaves it to transformers" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(model) is kind  # nothing was changed


@each
def test_they_are_left_to_transformers_if_told_so(make, message):
    model = make()
    moetor.attach(model, "eager")
    assert set(model.get_experts_implementation().values()) == {"eager"}
    assert "run by transformers: " in str(model.explain_experts())
    with pytest.raises(InvalidInput, match=message):
        model.set_experts_implementation("grouped_mm")


def test_one_quantised_layer_is_enough():
    model = build("gpt_oss")
    model.model.layers[1].mlp.experts = mxfp4(model.config)
    with pytest.raises(InvalidInput, match="Mxfp4GptOssExperts"):
        moetor.attach(model, "grouped_mm")
    assert [unreadable(experts) is None for experts in experts_in(model)] == [True, False]


def test_quantising_after_attaching_is_seen_at_the_next_call():
    model = moetor.attach(build("mixtral"))
    before = logits(model, tokens())
    experts = experts_in(model)[0]
    shape = experts.down_proj.shape
    experts.down_proj = nn.Parameter(PackedTensor(torch.zeros(shape, dtype=torch.int8)), requires_grad=False)
    with pytest.raises(InvalidInput, match="down_proj is a PackedTensor of"):
        logits(model, tokens())
    experts.down_proj = nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(InvalidInput, match="must be of a float dtype of 16 bits or more"):
        logits(model, tokens())
    assert before.isfinite().all()


@torch.no_grad()
def test_what_transformers_dequantises_is_run():
    # to bfloat16, as Mxfp4Config(dequantize=True) does: plain tensors
    model = build("gpt_oss").bfloat16()
    expected = logits(model, tokens())
    assert relative_error(logits(moetor.attach(model), tokens()), expected) <= 2e-2


# Mixtures of experts that transformers runs in ways of their own.


def test_other_arithmetic_is_refused_with_the_reason():
    from transformers import DogeConfig, DogeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    doge = DogeForCausalLM(DogeConfig(vocab_size=64, is_moe=True, num_experts=16, num_experts_per_tok=2, **sizes))
    with pytest.raises(InvalidInput, match="DogeCDMoE looks up single neurons"):
        moetor.attach(doge)


def test_a_mask_read_as_ids_is_not_imitated():
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": 64, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_experts": 4}
    nllb = NllbMoeForConditionalGeneration(NllbMoeConfig(**layers, **heads, **sizes))
    with pytest.raises(InvalidInput, match="NllbMoeExperts reads a mask of the chosen experts as if it were their ids"):
        moetor.attach(nllb)
