"""Every decorated experts class of the installed transformers, alone, against its own eager loop."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moetor import ExpertsInterface
from moetor.core.activation import Activation
from moetor.core.interface import describe_call
from moetor.integrations.transformers.adapters import FACTS_KEY, Facts, experts_of, facts_of
from moetor.integrations.transformers.choice import set_backend

from .backends import ON_CPU
from .compare import gradient_errors, relative_error
from .experts_classes import E, H, I, build, decorating_files, experts_classes

CLASSES = list(experts_classes())
BACKENDS = ON_CPU
T, K = 19, 3

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make_call(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states, ids (distinct within a token, one expert without tokens), routing weights."""
    hidden_states = torch.randn(T, H).to(dtype).requires_grad_()
    top_k_index = torch.rand(T, E - 1).topk(K).indices
    top_k_weights = torch.rand(T, K).to(dtype).requires_grad_()
    return hidden_states, top_k_index, top_k_weights


def run(module: nn.Module, call: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output, and the gradients of every parameter, of hidden_states and of the routing weights."""
    hidden_states, top_k_index, top_k_weights = call
    inputs = {"hidden_states": hidden_states, "top_k_weights": top_k_weights, **dict(module.named_parameters())}
    out = module(hidden_states, top_k_index, top_k_weights)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator).to(out.dtype)
    grads = torch.autograd.grad(out, list(inputs.values()), upstream, allow_unused=True)
    return out, dict(zip(inputs, grads, strict=True))


def errors(module: nn.Module, backend: str) -> dict[str, float]:
    """Of moetor against the module's own loop, for the output and each gradient."""
    call = make_call()
    expected, expected_grads = run(module, call)
    set_backend(module, backend)
    found, found_grads = run(module, call)
    return {"output": relative_error(found, expected), **gradient_errors(found_grads, expected_grads)}


def refusal(module: nn.Module, backend: str) -> str | None:
    """Why this backend does not take the module's experts."""
    with torch.random.fork_rng():  # the inputs of the test are those that it was written for
        weights, call = experts_of(module), make_call()
    return ExpertsInterface[backend].refusal(weights, describe_call(weights, *call))


def skip_if_refused(cls: type[nn.Module], backend: str) -> None:
    with torch.random.fork_rng():
        reason = refusal(build(cls), backend)
    if reason:
        pytest.skip(reason)


def test_every_decorated_class_is_found():
    files = decorating_files()
    print(f"\n{len(CLASSES)} experts classes in {len(files)} files")
    assert len(CLASSES) >= 50
    assert {cls.__module__.rpartition(".")[2] for cls in CLASSES} == {path.stem for path in files}


def test_no_class_ends_with_a_custom_gate():
    custom = [cls.__name__ for cls in CLASSES if facts_of(build(cls)).activation is None]
    print(f"\nclasses with a custom gate: {custom or 'none'}")
    assert custom == []


@every_class
def test_flags_agree_with_the_parameters(cls):
    module = build(cls)
    facts, shapes = facts_of(module), {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert facts.gated == ("gate_up_proj" in shapes)
    assert facts.has_bias == ("down_proj_bias" in shapes)
    assert facts.has_norm == ("post_expert_norm.weight" in shapes)
    assert facts.transposed == (shapes["down_proj"] == (E, I, H))


@every_class
@every_backend
def test_output_and_gradients_are_those_of_its_own_loop(cls, backend):
    skip_if_refused(cls, backend)
    wrong = {name: error for name, error in errors(build(cls), backend).items() if not error <= 1e-5}
    assert not wrong


def one_of_each_kind() -> list[type[nn.Module]]:
    """A class for each set of facts that occurs."""
    return list({facts_of(build(cls)): cls for cls in CLASSES}.values())


@pytest.mark.parametrize("cls", one_of_each_kind(), ids=lambda cls: cls.__name__)
@every_backend
def test_bf16_is_near_its_own_loop_in_float64(cls, backend):
    skip_if_refused(cls, backend)
    module, call = build(cls).bfloat16(), make_call(torch.bfloat16)
    exact = build(cls).double()
    exact.load_state_dict(module.state_dict())
    hidden_states, top_k_index, top_k_weights = call
    exact_call = hidden_states.detach().double(), top_k_index, top_k_weights.detach().double()
    expected, expected_grads = run(exact, tuple(t.requires_grad_(t.is_floating_point()) for t in exact_call))
    set_backend(module, backend)
    found, found_grads = run(module, call)
    # a few roundings of 2^-9; a product that is rounded onto a clamp also changes sides in the gradient
    assert relative_error(found, expected) <= 1e-2
    assert max(gradient_errors(found_grads, expected_grads).values()) <= 3e-2


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "sigmoid"])
def test_activation_named_in_the_config_is_read(act):
    (cls,) = [cls for cls in CLASSES if cls.__name__ == "Qwen3MoeExperts"]
    module = build(cls, hidden_act=act)
    assert facts_of(module).activation is not None
    assert max(errors(module, "grouped_mm").values()) <= 1e-5


def test_a_gate_that_nobody_knows_runs_as_the_model_wrote_it():
    (cls,) = [cls for cls in CLASSES if cls.__name__ == "Qwen3MoeExperts"]
    module = build(cls, hidden_act="mish")
    assert facts_of(module).activation is None
    ran = [backend for backend in BACKENDS if not refusal(module, backend)]
    assert {"eager", "batched_mm", "grouped_mm", "auto"} <= set(ran)
    for backend in ran:
        assert max(errors(module, backend).values()) <= 1e-5


def test_a_clamp_under_a_name_that_nobody_knows_is_not_dropped():
    (cls,) = [cls for cls in CLASSES if cls.__name__ == "Qwen3MoeExperts"]

    def clipped(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=10.0) * up

    module = build(cls)
    module.__class__ = type("ClippedExperts", (cls,), {"_apply_gate": clipped})
    assert facts_of(module).activation is None


def test_a_limit_held_in_a_tensor_is_read():
    (cls,) = [cls for cls in CLASSES if cls.__name__ == "GptOssExperts"]
    module = build(cls)
    limit = module.limit
    module.limit = torch.tensor(limit)
    activation = facts_of(module).activation
    assert activation is not None
    assert activation.limit == pytest.approx(limit)


def without(name: str, value: object = None) -> Callable[[Facts], Facts | None]:
    """The facts with one number of the gate left out; None where the gate does not have it."""

    def change(facts: Facts) -> Facts | None:
        if getattr(facts.activation, name) == getattr(Activation(), name):
            return None
        return replace(facts, activation=replace(facts.activation, **{name: value}))

    return change


# Facts read wrongly on purpose; None for a class that has nothing of the kind.
WRONG: dict[str, Callable[[Facts], Facts | None]] = {
    "no clamp": without("limit"),
    "no alpha": without("alpha", 1.0),
    "no offset": without("up_offset", 0.0),
    "no soft-cap of the gate": without("gate_softcap"),
    "no soft-cap of up": without("up_softcap"),
    "no bias": lambda facts: replace(facts, has_bias=False) if facts.has_bias else None,
    "no norm": lambda facts: replace(facts, has_norm=False) if facts.has_norm else None,
    "swapped layout": lambda facts: replace(facts, interleaved=not facts.interleaved) if facts.gated else None,
}


@pytest.mark.parametrize("wrong", WRONG)
@every_backend
def test_comparison_sees_facts_that_are_wrong(wrong, backend):
    seen = {}
    for cls in CLASSES:
        module = build(cls)
        facts = WRONG[wrong](facts_of(module))
        if facts is not None and not refusal(module, backend):
            module.__dict__[FACTS_KEY] = facts
            seen[cls.__name__] = errors(module, backend)["output"]
    if not seen:
        pytest.skip(f"no class of this transformers has it, or {backend} takes none that has: {wrong}")
    # a thousand times what right code is allowed
    assert min(seen.values()) > 1e-2, seen
