"""Each adapter is right where it is believed, and one that is wrong is not believed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import moetor
from moetor import ExpertWeights, InvalidInput
from moetor.integrations.transformers.adapters import (
    ADAPTER_KEY,
    FACTS_KEY,
    Adapter,
    adapter_of,
    experts_of,
    facts_of,
    is_experts,
    register_adapter,
)
from moetor.integrations.transformers.adapters.trial import twin
from moetor.integrations.transformers.choice import experts_by_key

from .compare import relative_error
from .models import LIMIT, build, logits, tokens
from .old_models import DeepseekLike, E, GroupedGate, H, I, MixtralLike, NamedProjections, Qwen2MoeLike, ThreeLinears

Change = Callable[[Adapter], Adapter]


def swapped_up(adapter: Adapter) -> Adapter:
    """Gate for up, and up for gate."""

    def weights(module: nn.Module, facts: Any) -> ExpertWeights:
        right = adapter.weights(module, facts)
        if isinstance(right.up, tuple):
            return replace(right, up=right.up[::-1])
        assert isinstance(right.up.data, Tensor)
        axis = 2 if right.up.transposed else 1
        return replace(right, up=replace(right.up, data=right.up.data.roll(right.intermediate_size, dims=axis)))

    return replace(adapter, weights=weights)


def no_clamp(adapter: Adapter) -> Adapter:
    def weights(module: nn.Module, facts: Any) -> ExpertWeights:
        right = adapter.weights(module, facts)
        return replace(right, activation=replace(right.activation, limit=None, limit_after=False))

    return replace(adapter, weights=weights)


def clamp_before(adapter: Adapter) -> Adapter:
    def weights(module: nn.Module, facts: Any) -> ExpertWeights:
        right = adapter.weights(module, facts)
        return replace(right, activation=replace(right.activation, limit_after=False))

    return replace(adapter, weights=weights)


def clamp_of_gate_only(adapter: Adapter) -> Adapter:
    def weights(module: Any, facts: Any) -> ExpertWeights:
        right = adapter.weights(module, facts)
        fn = lambda rows: torch.nn.functional.silu(rows.chunk(2, -1)[0]).clamp(max=module.limit) * rows.chunk(2, -1)[1]  # noqa: E731
        return replace(right, activation=moetor.Activation.custom(fn))

    return replace(adapter, weights=weights)


def no_identity_experts(adapter: Adapter) -> Adapter:
    def forward(module: Any, facts: Any, run: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return run(x, index.clamp(max=module.num_routed_experts), weights)

    return replace(adapter, forward=forward)


def identity_without_weight(adapter: Adapter) -> Adapter:
    def forward(module: Any, facts: Any, run: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        nothing = index >= module.num_routed_experts
        return run(x, index.clamp(max=module.num_routed_experts), weights) + nothing.sum(-1, keepdim=True) * x

    return replace(adapter, forward=forward)


def output_scaled(adapter: Adapter) -> Adapter:
    """llama4 as if it were any other model: the score on the output."""

    def forward(block: Any, facts: Any, run: Any, hidden_states: Tensor) -> Any:
        x = hidden_states.reshape(-1, block.hidden_dim)
        scores, said = block.router(x)
        chosen = scores.topk(block.top_k)
        return block.shared_expert(x) + run(x, chosen.indices, chosen.values), said

    return replace(adapter, forward=forward)


def input_not_scaled(adapter: Adapter) -> Adapter:
    def forward(block: Any, facts: Any, run: Any, hidden_states: Tensor) -> Any:
        x = hidden_states.reshape(-1, block.hidden_dim)
        scores, said = block.router(x)
        chosen = scores.topk(block.top_k)
        return block.shared_expert(x) + run(x, chosen.indices, torch.ones_like(chosen.values)), said

    return replace(adapter, forward=forward)


def no_shared_expert(adapter: Adapter) -> Adapter:
    def forward(block: Any, facts: Any, run: Any, hidden_states: Tensor) -> Any:
        out, said = adapter.forward(block, facts, run, hidden_states)
        return out - block.shared_expert(hidden_states.reshape(-1, block.hidden_dim)), said

    return replace(adapter, forward=forward)


def no_bias_of_the_block(adapter: Adapter) -> Adapter:
    def forward(block: Any, facts: Any, run: Any, x: Tensor) -> Tensor:
        return adapter.forward(block, facts, run, x) - block.bias

    return replace(adapter, forward=forward)


def down_not_transposed(adapter: Adapter) -> Adapter:
    """Flat weights cut into (E, H, I), which their size allows."""

    def weights(module: Any, facts: Any) -> ExpertWeights:
        right = adapter.weights(module, facts)
        cut = module.mlp.w2.view(right.num_experts, right.hidden_size, right.intermediate_size)
        return replace(right, down=moetor.Weight(cut))

    return replace(adapter, weights=weights)


def no_capacity(adapter: Adapter) -> Adapter:
    def forward(experts: Any, facts: Any, run: Any, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        return run(x, mask.int().argmax(-1), weights)

    return replace(adapter, forward=forward)


WRONG: list[tuple[str, Change]] = [
    ("step3p7", swapped_up),
    ("step3p7", no_clamp),
    ("step3p7", clamp_before),
    ("step3p7", clamp_of_gate_only),
    ("longcat_flash", swapped_up),
    ("longcat_flash", no_identity_experts),
    ("longcat_flash", identity_without_weight),
    ("llama4", swapped_up),
    ("llama4", output_scaled),
    ("llama4", input_not_scaled),
    ("llama4", no_shared_expert),
    ("llama4_top2", output_scaled),
    ("dbrx", swapped_up),
    ("dbrx", down_not_transposed),
    ("jetmoe", swapped_up),
    ("jetmoe", no_bias_of_the_block),
    ("switch_transformers", no_capacity),
]
each_fault = pytest.mark.parametrize(
    ("name", "change"), WRONG, ids=lambda value: value if isinstance(value, str) else value.__name__
)


def experts_in(model: nn.Module) -> list[Any]:
    return [module for modules in experts_by_key(model).values() for module in modules]


@pytest.fixture
def replaced() -> Iterator[Callable[[nn.Module, Change], Adapter]]:
    """Exchange the adapter of a model's experts."""
    before: list[Adapter] = []

    def replace_adapter(model: nn.Module, change: Change) -> Adapter:
        adapter = adapter_of(experts_in(model)[0])
        before.append(adapter)
        # its first reading only: another may be right in spite of the change
        first = replace(change(adapter), read=lambda module: list(adapter.read(module))[:1])
        register_adapter(first, replace=True)
        return first

    yield replace_adapter
    for adapter in before:
        register_adapter(adapter, replace=True)


@each_fault
def test_wrong_adapter_is_refused_when_a_model_is_attached(name, change, replaced):
    model = build(name)
    replaced(model, change)
    with pytest.raises(InvalidInput, match=r"is not what the adapter '\w+' knows: its results are off by"):
        moetor.attach(model)
    assert not any(FACTS_KEY in module.__dict__ and "forward" in module.__dict__ for module in model.modules())


@each_fault
@torch.no_grad()
def test_wrong_adapter_would_be_seen_in_the_logits(name, change, replaced):
    if change is no_capacity and transformers.__version__.startswith("5.17."):
        pytest.skip("its router does not count the tokens of a sequence, so that no expert is ever full")
    model = build(name)
    expected = logits(model, tokens())
    moetor.attach(model, "eager")
    assert relative_error(logits(model, tokens()), expected) <= 1e-5
    replaced(model, change)  # after attaching, so that it is not tried
    assert relative_error(logits(model, tokens()), expected) > 2e-2


def test_limit_of_each_layer_is_its_own():
    model = moetor.attach(build("step3p7"), "eager")
    experts = experts_in(model)
    assert [experts_of(module).activation.limit for module in experts] == [LIMIT, None]
    assert experts_of(experts[0]).activation.limit_after


def test_experts_that_do_nothing_may_be_all_that_are_chosen():
    model = build("longcat_flash")
    experts = experts_in(model)[0]
    x, index, weights = torch.randn(5, H), torch.full((5, 2), E + 1), torch.rand(5, 2)
    expected = experts(x, index, weights)
    moetor.attach(model, "grouped_mm")
    found = experts(x, index, weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, x * weights.sum(-1, keepdim=True))


def test_gate_that_nobody_knows_runs_as_the_model_wrote_it():
    for name, owner, attribute in (
        ("dbrx", "mlp", "activation_fn"),
        ("llama4", "experts", "act_fn"),
        ("jetmoe", "", "activation"),
        ("longcat_flash", "", "act_fn"),
    ):
        model = build(name)
        for module in experts_in(model):
            setattr(getattr(module, owner) if owner else module, attribute, nn.Mish())
        expected = logits(model, tokens())
        moetor.attach(model, "grouped_mm")
        assert {experts_of(module).activation.kind for module in experts_in(model)} == {"custom"}
        assert relative_error(logits(model, tokens()), expected) <= 1e-5


def test_undecorated_experts_of_a_stranger_are_read_in_every_layout():
    class Strangers(nn.Module):
        def __init__(self, transposed: bool, interleaved: bool) -> None:
            super().__init__()
            self.transposed, self.interleaved, self.act_fn = transposed, interleaved, nn.GELU()
            up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
            self.gate_up_proj = nn.Parameter(up.mT.contiguous() if transposed else up)
            self.down_proj = nn.Parameter(down.mT.contiguous() if transposed else down)

        def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for expert in range(E):
                token, slot = (index == expert).nonzero(as_tuple=True)
                up, down = self.gate_up_proj[expert], self.down_proj[expert]
                up, down = (up, down) if self.transposed else (up.T, down.T)
                rows = x[token] @ up
                gate, up = (rows[:, ::2], rows[:, 1::2]) if self.interleaved else rows.chunk(2, -1)
                out.index_add_(0, token, (self.act_fn(gate) * up) @ down * weights[token, slot, None])
            return out

    for transposed in (False, True):
        for interleaved in (False, True):
            experts = Strangers(transposed, interleaved)
            found = experts_of(experts)
            assert found.activation.kind == "gelu"
            assert (found.interleaved, found.down.transposed) == (interleaved, transposed)


def test_switch_drops_out_in_training_as_the_model_does():
    model = moetor.attach(build("switch_transformers"), "eager").train()
    experts = experts_in(model)[0]
    x, mask = torch.randn(6, H), nn.functional.one_hot(torch.arange(6)[:, None], E)
    first, second = experts(x, mask, torch.ones(6, 1)), experts(x, mask, torch.ones(6, 1))
    assert not torch.equal(first, second)
    for mlp in experts.children():
        mlp.dropout.p = 0.0
    expected = torch.stack([mlp(row) for mlp, row in zip(experts.children(), x, strict=False)])
    torch.testing.assert_close(experts(x, mask, torch.ones(6, 1)), expected)


# Blocks that loop over a ModuleList, and what is refused of them.


def block_call(block: nn.Module) -> tuple[Any, Any]:
    """What the block gives by itself, and by moetor."""
    x = torch.randn(2, 7, H)
    expected = block(x)
    moetor.integrations.transformers.adapters.install(block)
    facts_of(block)
    return expected, block(x)


@pytest.mark.parametrize("make", [MixtralLike, Qwen2MoeLike, DeepseekLike], ids=lambda make: make.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_block_gives_all_that_it_gave(make, training):
    expected, found = block_call(make().train(training))
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("inner", "ups", "down"),
    [(ThreeLinears, ("w1", "w3"), "w2"), (NamedProjections, ("gate_proj", "up_proj"), "down_proj")],
)
def test_linears_are_told_apart_by_what_they_do_and_not_by_name(inner, ups, down):
    block = MixtralLike()
    block.experts = nn.ModuleList(inner(H, H) for _ in range(E))  # all of one shape
    mlp = facts_of(block).mlp
    assert (mlp.ups, mlp.down) == (ups, down)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(H, I), nn.Linear(I, H), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def test_mlps_without_a_gate_and_with_biases_are_read():
    block = MixtralLike()
    block.experts = nn.ModuleList(TwoLinears() for _ in range(E))
    expected, found = block_call(block)
    torch.testing.assert_close(found, expected)
    weights = experts_of(block)
    assert (weights.gated, weights.activation.kind) == (False, "gelu_tanh")
    assert weights.down.bias is not None
    moetor.stack_experts(block)
    assert experts_of(block).stacked


class Clamped(ThreeLinears):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2((self.act_fn(self.w1(x)) * self.w3(x)).clamp(-3, 3))


class OwnRouting(MixtralLike):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        out, said = super().forward(hidden_states)
        return out * 0.5, said


class Linear4bit(nn.Linear):
    """Stands for any library's Linear in place of torch's."""


def with_expert(change: Callable[[nn.Module], None]) -> nn.Module:
    block = MixtralLike()
    for expert in block.experts:
        change(expert)
    return block


def _lacking(block: MixtralLike) -> MixtralLike:
    block.experts[1] = None
    return block


def _other_size(block: MixtralLike) -> MixtralLike:
    block.experts[1] = ThreeLinears(H, I + 1)
    return block


def _of_another_kind(block: MixtralLike) -> MixtralLike:
    block.experts[1] = Clamped()
    return block


def _of_experts(block: MixtralLike, make: Callable[[], nn.Module]) -> MixtralLike:
    block.experts = nn.ModuleList(make() for _ in range(E))
    return block


def _with_part(block: nn.Module, name: str) -> nn.Module:
    setattr(block, name, nn.Linear(H, H))
    return block


def _without(block: nn.Module, name: str) -> nn.Module:
    delattr(block, name)
    return block


REFUSED = {
    "experts of other ranks": (lambda: _lacking(MixtralLike()), "some of its experts are not here"),
    "experts that differ": (lambda: _other_size(MixtralLike()), r"its experts \(ThreeLinears\) differ in their sizes"),
    "experts of two kinds": (lambda: _of_another_kind(MixtralLike()), "its experts differ: not each is a ThreeLinears"),
    "another function": (lambda: _of_experts(MixtralLike(), Clamped), r"\(Clamped\) compute no down\(f\(gate\) · up\)"),
    "no MLPs": (
        lambda: _of_experts(MixtralLike(), lambda: nn.Linear(H, H)),
        "are not made of two or three Linears, but of no parts",
    ),
    "a library's Linear": (
        lambda: with_expert(lambda expert: setattr(expert, "w1", Linear4bit(H, I, bias=False))),
        r"ThreeLinears.w1 is no torch.nn.Linear but .*Linear4bit",
    ),
    "a part of unknown use": (lambda: _with_part(MixtralLike(), "adaptor"), "it has parts of unknown use: adaptor"),
    "no gate": (lambda: _without(MixtralLike(), "gate"), "it has no gate"),
    "another way of routing": (OwnRouting, "puts its parts together in a way of its own"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_block_that_is_not_understood_is_refused_by_what_is_not(make, message):
    block = make()
    assert is_experts(block)
    with pytest.raises(InvalidInput, match=message) as caught:
        facts_of(block)
    assert type(block).__name__ in str(caught.value)
    assert ADAPTER_KEY not in block.__dict__


def test_block_with_noise_in_training_runs_in_evaluation_only():
    block = MixtralLike(jitter=0.1).eval()
    expected, found = block_call(block)
    torch.testing.assert_close(found, expected)
    with pytest.raises(InvalidInput, match="computes something else in training"):
        block.train()(torch.randn(1, 3, H))


def test_loss_of_a_gate_is_not_dropped():
    block = DeepseekLike(loss=True).eval()
    expected, found = block_call(block)
    torch.testing.assert_close(found, expected)
    with pytest.raises(InvalidInput, match="computes something else in training|would drop"):
        block.train()(torch.randn(1, 3, H))


def test_linear_that_was_wrapped_after_attaching_is_not_overlooked():
    class Wrapped(nn.Module):
        """As LoRA does it: has a weight, and adds something to it."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        @property
        def weight(self) -> Tensor:
            return self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    block = MixtralLike()
    block_call(block)
    block.experts[3].w1 = Wrapped(block.experts[3].w1)
    with pytest.raises(InvalidInput, match="w1 is no torch.nn.Linear but .*Wrapped"):
        block(torch.randn(1, 3, H))


def test_hooks_on_what_is_not_called_are_not_forgotten():
    block = MixtralLike()
    block_call(block)
    handle = block.experts[2].w3.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(InvalidInput, match="ThreeLinears.w3 has hooks, which moetor would not call"):
        block(torch.randn(1, 3, H))
    handle.remove()
    prune.l1_unstructured(block.experts[1].w2, "weight", amount=0.5)
    with pytest.raises(InvalidInput, match="ThreeLinears.w2 has hooks"):
        block(torch.randn(1, 3, H))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize(
    ("name", "holder", "parameter"),
    [
        ("llama4", "experts", "down_proj"),
        ("dbrx", "mlp", "w2"),
        ("longcat_flash", "", "down_proj"),
        ("step3p7", "", "gate_up_proj"),
        ("jetmoe", "input_linear", "weight"),
        ("old_mixtral", "experts.3.w2", "weight"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_weights_are_read_through_their_parametrization(name, holder, parameter, when):
    model, plain = build(name), build(name)
    plain.load_state_dict(model.state_dict())
    if when == "after":
        moetor.attach(model)
    for each in (model, plain):
        for module in experts_in(each):
            parametrize.register_parametrization(module.get_submodule(holder), parameter, Halved())
    if when == "before":
        moetor.attach(model)
    expected = logits(plain, tokens())
    assert relative_error(logits(model, tokens()), expected) <= 1e-5
    for module in experts_in(plain):
        parametrize.remove_parametrizations(module.get_submodule(holder), parameter, leave_parametrized=False)
    assert relative_error(logits(plain, tokens()), expected) > 1e-2


def test_model_pickled_with_an_adapter_of_its_own_says_which_is_missing():
    model = moetor.attach(build("longcat_flash"))
    experts_in(model)[0].__dict__[ADAPTER_KEY] = "somebody's"
    with pytest.raises(InvalidInput, match='was attached with the adapter "somebody\'s"; register it here, too'):
        logits(model, tokens())


def test_copy_that_is_tried_is_small_and_without_hooks():
    gate = GroupedGate()
    gate.register_forward_hook(lambda *_: pytest.fail("a hook of the model's own was called"))
    other = twin(gate, {H: 8})
    other(torch.randn(1, 4, 8))
    assert other.weight.shape == (E, 8)
    assert gate.weight.shape == (E, H)


def test_trying_leaves_random_numbers_and_gradients_as_they_were():
    block, before = MixtralLike(), torch.get_rng_state()
    facts_of(block)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in block.parameters())
