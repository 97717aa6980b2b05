"""`load_state_dict` of an attached model takes what files hold, where transformers' Trainer resumes by it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import moetor
from moetor.integrations.transformers.adapters import is_experts

from .models import CONFIGS, build


def blank(plain: PreTrainedModel) -> PreTrainedModel:
    """An attached model of the same config that knows nothing."""
    model = moetor.attach(type(plain)(plain.config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def saved(plain: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    plain.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_files_of_every_architecture(name, tmp_path):
    plain = build(name)
    if not any(is_experts(module) for module in plain.modules()):
        pytest.skip(f"this release of transformers has no interface for the experts of {name}")
    model, held = blank(plain), saved(plain, tmp_path)
    pointers = {key: parameter.data_ptr() for key, parameter in model.named_parameters()}
    missing = model.load_state_dict(held, strict=False).missing_keys
    assert {
        key: parameter.data_ptr() for key, parameter in model.named_parameters()
    } == pointers  # an optimizer has them
    # names of other parts that a release changed, and tied ones, are transformers' business
    of_experts = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if is_experts(module)
        for key, _ in module.named_parameters()
    ]
    for key in of_experts:
        assert torch.equal(model.get_parameter(key), plain.get_parameter(key))
    assert not set(of_experts) & set(missing)


def test_precision_is_that_of_the_files(tmp_path):
    plain = build("qwen3_moe")
    held = saved(plain, tmp_path)
    plain.config.dtype = torch.bfloat16
    model = blank(plain).float()
    model.load_state_dict(held)
    assert torch.equal(
        model.get_parameter("model.layers.0.mlp.experts.down_proj"), plain.model.layers[0].mlp.experts.down_proj
    )


@pytest.mark.parametrize("strict", [True, False])
def test_some_of_the_experts_are_refused(strict, tmp_path):
    plain = build("qwen3_moe")
    model, held = blank(plain), saved(plain, tmp_path)
    one = "model.layers.1.mlp.experts.3.up_proj.weight"
    for cut in (
        {key: held[key] for key in held if key != one},
        {key: held[key] for key in held if ".layers.1." in key},
    ):
        with pytest.raises(moetor.CheckpointError, match="has weights of single experts .* load all files together"):
            model.load_state_dict(cut, strict=strict)
    assert not any(parameter.any() for parameter in model.parameters())


def test_dicts_of_the_model_itself_pass_as_they_are(tmp_path, monkeypatch):
    plain = build("qwen3_moe")
    model = blank(plain)
    monkeypatch.setattr(type(plain), "from_pretrained", None)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    # without experts, and with a key that nothing has, as with adapters
    part = {"lm_head.weight": torch.ones_like(plain.lm_head.weight), "odd": torch.ones(1)}
    assert model.load_state_dict(part, strict=False).unexpected_keys == ["odd"]
    assert model.lm_head.weight.all()
    with pytest.raises(RuntimeError, match="odd"):
        model.load_state_dict(part)


def test_what_does_not_fit_besides_is_told_as_ever(tmp_path):
    plain = build("qwen3_moe")
    model, held = blank(plain), saved(plain, tmp_path)
    with pytest.raises(RuntimeError, match='Unexpected key.*"odd"'):
        model.load_state_dict({**held, "odd": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch for lm_head.weight"):
        model.load_state_dict({**held, "lm_head.weight": torch.ones(3, 3)})
