"""Whole models: moetor's logits and gradients against plain transformers with its own eager experts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import moetor
from moetor.integrations.transformers.adapters import _FACTS, facts_of, is_experts

from .backends import ON_CPU
from .compare import gradient_errors, relative_error
from .models import CONFIGS, auto_class, build, logits, tokens

BACKENDS = ON_CPU

every_architecture = pytest.mark.parametrize("name", CONFIGS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def experts_in(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_experts(module)]


def pair(name: str, backend: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A plain model that moetor never touched, and one of the same state dict that it runs."""
    config = CONFIGS[name]()
    plain = build(name, config)
    if name == "aria" and not experts_in(plain):
        pytest.skip("this transformers runs aria's experts outside its experts interface")
    other = build(name, config)
    other.load_state_dict(plain.state_dict())
    return plain.to(dtype), moetor.attach(other.to(dtype), backend)


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits, and the gradient of every parameter."""
    out = logits(model, tokens())
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream.to(out.dtype))
    return out, {name: parameter.grad for name, parameter in model.named_parameters()}


@every_architecture
@every_backend
def test_logits_and_gradients_are_those_of_transformers(name, backend):
    plain, attached = pair(name, backend)
    (expected, expected_grads), (found, found_grads) = run(plain), run(attached)
    assert relative_error(found, expected) <= 1e-5
    wrong = {key: error for key, error in gradient_errors(found_grads, expected_grads).items() if not error <= 1e-5}
    assert not wrong


@every_architecture
@every_backend
@torch.no_grad()
def test_bf16_logits_are_those_of_transformers(name, backend):
    plain, attached = pair(name, backend, torch.bfloat16)
    assert relative_error(logits(attached, tokens()), logits(plain, tokens())) <= 2e-2


@every_architecture
@torch.no_grad()
def test_saved_checkpoint_loads_with_the_same_logits(name, tmp_path):
    plain, _ = pair(name, "auto")
    plain.save_pretrained(tmp_path)
    own = auto_class(name).from_pretrained(tmp_path, experts_implementation="eager")
    loaded = auto_class(name, moetor).from_pretrained(tmp_path, experts_implementation="batched_mm")
    assert relative_error(logits(loaded, tokens()), logits(own, tokens())) <= 1e-5


def _no_clamp(module: nn.Module) -> None:
    facts = facts_of(module)
    module.__dict__[_FACTS] = replace(facts, activation=replace(facts.activation, limit=None))


def _one_bias_zero(module: nn.Module) -> None:
    module.gate_up_proj_bias[1].zero_()


def _layout_swapped(module: nn.Module) -> None:
    facts = facts_of(module)
    module.__dict__[_FACTS] = replace(facts, interleaved=not facts.interleaved)


def _one_expert_zero(module: nn.Module) -> None:
    module.down_proj[1].zero_()


@torch.no_grad()
def damage_done(name: str, backend: str, damage: Callable[[nn.Module], None]) -> float:
    """The error of the logits when something is wrong in every experts module."""
    plain, attached = pair(name, backend)
    for module in experts_in(attached):
        damage(module)
    return relative_error(logits(attached, tokens()), logits(plain, tokens()))


# All of these are far above what fp32 is allowed, and above what bf16 is.
@every_backend
@pytest.mark.parametrize("damage", [_no_clamp, _one_bias_zero, _layout_swapped], ids=lambda damage: damage.__name__)
def test_comparison_sees_damage_to_gpt_oss(backend, damage):
    assert damage_done("gpt_oss", backend, damage) > 2e-2


@every_architecture
def test_comparison_sees_one_expert_missing(name):
    assert damage_done(name, "grouped_mm", _one_expert_zero) > 2e-2


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "nemotron_h"])  # it has no gate
def test_comparison_sees_a_swapped_layout(name):
    assert damage_done(name, "grouped_mm", _layout_swapped) > 2e-2
