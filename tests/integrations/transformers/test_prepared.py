"""Quantised experts laid out for one backend: kept until something changes them, and nobody else's business."""

from dataclasses import replace

import pytest
import torch

import moetor
from moetor import Backend, BackendRefused, ExpertsInterface, FineGrainedFP8Config, InvalidInput
from moetor.core.weights import Prepared

from .models import build, tokens
from .models import logits as logits_of

RAN: list[Prepared | None] = []


def logits(model):
    return logits_of(model, tokens()).detach()


def reads_turned(weights, call) -> str | None:
    return None if weights.prepared else "needs weights laid out for it"


def forward(weights, *call):
    RAN.append(weights.prepared)
    (turned,) = weights.prepared.down
    return ExpertsInterface["eager"].forward(
        replace(weights, down=replace(weights.down, data=turned.transpose(1, 2).contiguous())), *call
    )


def prepare(weights):
    return replace(weights, prepared=Prepared("turned", (), (weights.down.data.transpose(1, 2).contiguous(),)))


@pytest.fixture
def model(tmp_path):
    ExpertsInterface.register("turned", Backend("turned", forward, why_not=reads_turned, prepare=prepare))
    torch.manual_seed(0)
    build("qwen3_moe").save_pretrained(tmp_path)
    config = FineGrainedFP8Config(weight_block_size=(16, 16))
    yield moetor.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    ExpertsInterface.unregister("turned")


def test_experts_run_by_the_copy_until_they_change(model) -> None:
    expected = logits(model)
    assert model.prepare_experts() == 0  # auto reads them as they are
    model.set_experts_implementation("turned")
    with pytest.raises(BackendRefused, match="laid out"):
        logits(model)
    layers = model.config.num_hidden_layers
    assert model.prepare_experts() == layers
    assert torch.equal(logits(model), expected)
    assert len(RAN) == layers
    # others read the weights themselves
    model.set_experts_implementation("eager")
    assert torch.equal(logits(model), expected)
    model.set_experts_implementation("turned")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("change", ["to", "load_state_dict", "in place", "part"])
def test_a_change_drops_the_copy(model, change: str) -> None:
    model.set_experts_implementation("turned")
    model.prepare_experts()
    first = model.model.layers[0].mlp.experts
    if change == "to":
        model.to("cpu")
    elif change == "load_state_dict":
        model.load_state_dict(model.state_dict())
    elif change == "in place":
        with torch.no_grad():
            first.gate_up_proj_scale_inv.mul_(2)
    else:
        model.model.layers[0].load_state_dict(model.model.layers[0].state_dict(), assign=False)
    with pytest.raises(BackendRefused, match="laid out"):
        logits(model)
    model.prepare_experts()
    assert logits(model).isfinite().all()


def test_weights_that_require_a_gradient_are_not_prepared(model) -> None:
    model.set_experts_implementation("turned")
    model.model.layers[0].mlp.experts.gate_up_proj_scale_inv.requires_grad_()
    with pytest.raises(InvalidInput, match="needs frozen weights"):
        model.prepare_experts()
