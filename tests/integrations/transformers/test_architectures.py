"""Whole models: moetor's logits, gradients and generated text against plain transformers with its own eager experts."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import moetor
from moetor import ExpertWeights
from moetor.integrations.transformers.adapters import (
    adapter_of,
    experts_of,
    register_adapter,
)
from moetor.integrations.transformers.choice import experts_by_key

from .backends import ON_CPU
from .compare import gradient_errors, relative_error
from .models import CONFIGS, auto_class, build, logits, tokens

# auto runs one of the others; it takes part where its choice does
BACKENDS = ON_CPU
NAMED = tuple(name for name in ON_CPU if name != "auto")
STACKED = ("grouped_mm", "batched_mm")

every_architecture = pytest.mark.parametrize("name", CONFIGS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_named_backend = pytest.mark.parametrize("backend", NAMED)


def experts_in(model: nn.Module) -> list[nn.Module]:
    return [module for modules in experts_by_key(model).values() for module in modules]


def pair(name: str, backend: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A plain model that moetor never touched, and one of the same state dict that it runs."""
    config = CONFIGS[name]()
    plain = build(name, config).to(dtype)
    other = build(name, config).to(dtype)
    other.load_state_dict(plain.state_dict())
    moetor.attach(other, backend)
    if backend in STACKED and not experts_of(experts_in(other)[0]).stacked:
        moetor.stack_experts(other)
    return plain, other


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits, and the gradient of every parameter."""
    out = logits(model, tokens())
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream.to(out.dtype))
    return out, {name: parameter.grad for name, parameter in model.named_parameters()}


def own_errors(plain: nn.Module) -> dict[str, float]:
    """How far the gradients of transformers itself lie from those in float64."""
    (_, found), (_, exact) = run(copy.deepcopy(plain)), run(copy.deepcopy(plain).double())
    return gradient_errors(found, exact)


@every_architecture
@every_backend
def test_logits_and_gradients_are_those_of_transformers(name, backend):
    plain, attached = pair(name, backend)
    own = own_errors(plain)
    (expected, expected_grads), (found, found_grads) = run(plain), run(attached)
    assert relative_error(found, expected) <= 1e-5
    errors = gradient_errors(found_grads, expected_grads)
    # hc_fn of deepseek_v4 is off by 1e-5 in transformers already
    wrong = {key: error for key, error in errors.items() if not error <= 1e-5 + own[key]}
    assert not wrong


@every_architecture
@every_named_backend
@torch.no_grad()
def test_bf16_logits_are_those_of_transformers(name, backend):
    plain, attached = pair(name, backend, torch.bfloat16)
    exact = logits(copy.deepcopy(plain).double(), tokens())
    # where rounding sends a token to another expert, transformers itself is off by more
    own = relative_error(logits(plain, tokens()), exact)
    assert relative_error(logits(attached, tokens()), exact) <= 2e-2 + own


@functools.cache
def generated(name: str, num_beams: int) -> Tensor:
    """By the plain model."""
    return generate(build_again(name), num_beams)


@functools.cache
def build_again(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build(name)


def generate(model: nn.Module, num_beams: int) -> Tensor:
    text = model.thinker if hasattr(model, "thinker") else model
    keywords = {"decoder_input_ids": tokens(3)} if text.config.is_encoder_decoder else {}
    return text.generate(tokens(6), max_new_tokens=6, num_beams=num_beams, do_sample=False, pad_token_id=0, **keywords)


@every_architecture
@every_named_backend
@pytest.mark.parametrize("num_beams", [1, 3], ids=["greedy", "beams"])
def test_generated_text_is_that_of_transformers(name, backend, num_beams):
    attached = moetor.attach(copy.deepcopy(build_again(name)), backend)
    if backend in STACKED and not experts_of(experts_in(attached)[0]).stacked:
        moetor.stack_experts(attached)
    assert torch.equal(generate(attached, num_beams), generated(name, num_beams))


@every_architecture
@torch.no_grad()
def test_saved_checkpoint_loads_with_the_same_logits(name, tmp_path):
    plain, _ = pair(name, "auto")
    plain.save_pretrained(tmp_path)
    own = auto_class(name).from_pretrained(tmp_path, experts_implementation="eager")
    loaded = auto_class(name, moetor).from_pretrained(tmp_path, experts_implementation="auto")
    assert relative_error(logits(loaded, tokens()), logits(own, tokens())) <= 1e-5


Damage = Callable[[ExpertWeights], ExpertWeights]


def no_clamp(weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, activation=replace(weights.activation, limit=None, limit_after=False))


def one_bias_missing(weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, down=replace(weights.down, bias=weights.down.bias * (torch.arange(8) != 1)[:, None]))


def gate_and_up_swapped(weights: ExpertWeights) -> ExpertWeights:
    if isinstance(weights.up, tuple):
        return replace(weights, up=weights.up[::-1])
    assert isinstance(weights.up.data, Tensor)
    rows = weights.up.data.shape[1 if not weights.up.transposed else 2]
    data = weights.up.data.roll(rows // 2, dims=1 if not weights.up.transposed else 2)
    if weights.interleaved:
        data = weights.up.data.roll(1, dims=1 if not weights.up.transposed else 2)
    return replace(weights, up=replace(weights.up, data=data))


def layout_swapped(weights: ExpertWeights) -> ExpertWeights:
    """Gate rows first, read as every other row, or the other way round."""
    if isinstance(weights.up, tuple):
        return gate_and_up_swapped(weights)
    return replace(weights, interleaved=not weights.interleaved)


def every_other_expert_missing(weights: ExpertWeights) -> ExpertWeights:
    data = [matrix * (number % 2) for number, matrix in enumerate(weights.down.data)]
    return replace(weights, down=replace(weights.down, data=data if not weights.stacked else torch.stack(data)))


@pytest.fixture
def damaged() -> Iterator[Callable[[nn.Module, Damage], None]]:
    """Make every adapter of a model read its weights wrongly."""
    changed = {}

    def damage_all(model: nn.Module, damage: Damage) -> None:
        for adapter in {adapter_of(module) for module in experts_in(model)}:
            changed[adapter.name] = adapter
            weights = functools.partial(_damaged_weights, adapter, damage)
            register_adapter(replace(adapter, weights=weights), replace=True)

    yield damage_all
    for adapter in changed.values():
        register_adapter(adapter, replace=True)


def _damaged_weights(adapter, damage, module, facts):
    return damage(adapter.weights(module, facts))


@torch.no_grad()
def damage_done(name, backend, damage, damaged) -> float:
    """The error of the logits when the adapter reads something wrongly in every experts module."""
    plain, attached = pair(name, backend)
    damaged(attached, damage)
    return relative_error(logits(attached, tokens()), logits(plain, tokens()))


# All of these are far above what fp32 is allowed, and above what bf16 is.
@every_named_backend
@pytest.mark.parametrize("damage", [no_clamp, one_bias_missing, layout_swapped], ids=lambda damage: damage.__name__)
def test_comparison_sees_damage_to_gpt_oss(backend, damage, damaged):
    assert damage_done("gpt_oss", backend, damage, damaged) > 2e-2


@pytest.mark.parametrize("name", ["deepseek_v4", "step3p7"])
def test_comparison_sees_a_clamp_missing(name, damaged):
    assert damage_done(name, "grouped_mm", no_clamp, damaged) > 2e-2


@every_architecture
def test_comparison_sees_every_other_expert_missing(name, damaged):
    assert damage_done(name, "grouped_mm", every_other_expert_missing, damaged) > 2e-2


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("nemotron_h", "switch_transformers")])
@pytest.mark.parametrize("damage", [layout_swapped, gate_and_up_swapped], ids=lambda damage: damage.__name__)
def test_comparison_sees_a_swapped_layout(name, damage, damaged):
    # the two left out have no gate
    assert damage_done(name, "grouped_mm", damage, damaged) > 2e-2
