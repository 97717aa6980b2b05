"""Checkpoints that lack something or are damaged: one CheckpointError each, naming the checkpoint and what it lacks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import moetor

from .compare import relative_error
from .models import E, H, I, auto_class, build, logits, tokens

LAYER = "model.layers.0.mlp.experts."
PARTS = ("gate_proj", "up_proj", "down_proj")
SHARD = "model-00002-of-"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder as save_pretrained writes it: one tensor per expert."""
    folder = tmp_path_factory.mktemp("checkpoints") / "whole"
    build("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.fixture
def sharded(tmp_path) -> Path:
    """The same in several files and an index."""
    build("qwen3_moe").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    return tmp_path / "sharded"


def rewrite(whole: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the checkpoint with its tensors changed."""
    shutil.copytree(whole, folder)
    tensors = load_file(whole / "model.safetensors")
    change(tensors)
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def error_of(folder: Path, **keywords: object) -> str:
    """What loading says; the same whichever backend was named."""
    messages = set()
    for choice in ("auto", "eager", "grouped_mm"):
        with pytest.raises(moetor.CheckpointError) as caught:
            moetor.AutoModelForCausalLM.from_pretrained(folder, experts_implementation=choice, **keywords)
        messages.add(str(caught.value))
    (message,) = messages
    assert str(folder) in message
    return message


def test_saved_checkpoint_loads_with_the_same_results(tmp_path):
    plain = build("qwen3_moe")
    plain.save_pretrained(tmp_path)
    model = moetor.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="grouped_mm")
    assert relative_error(logits(model, tokens()), logits(plain, tokens())) <= 1e-5


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("expert", [0, 3, E - 1])
def test_one_missing_tensor_of_an_expert_is_named(whole, tmp_path, part, expert):
    key = f"{LAYER}{expert}.{part}.weight"
    message = error_of(rewrite(whole, tmp_path / "broken", lambda tensors: tensors.pop(key)))
    assert f"lacks expert weights: {key}" in message


def test_one_missing_expert_is_named(whole, tmp_path):
    keys = sorted(f"{LAYER}3.{part}.weight" for part in PARTS)
    message = error_of(rewrite(whole, tmp_path / "broken", lambda tensors: [tensors.pop(key) for key in keys]))
    assert "lacks expert weights: " + ", ".join(keys) in message


def test_last_expert_missing_everywhere_is_seen(whole, tmp_path):
    def change(tensors):
        for key in [key for key in tensors if f".experts.{E - 1}." in key]:
            del tensors[key]

    message = error_of(rewrite(whole, tmp_path / "broken", change))
    assert f"{LAYER}down_proj {(E - 1, H, I)}, not {(E, H, I)}" in message


def test_layer_without_any_experts_is_named(whole, tmp_path):
    def change(tensors):
        for key in [key for key in tensors if key.startswith(LAYER)]:
            del tensors[key]

    message = error_of(rewrite(whole, tmp_path / "broken", change))
    assert f"lacks expert weights: {LAYER}down_proj, {LAYER}gate_up_proj" in message


@pytest.mark.parametrize("part", PARTS)
def test_one_expert_of_another_shape_is_named(whole, tmp_path, part):
    key = f"{LAYER}3.{part}.weight"
    message = error_of(rewrite(whole, tmp_path / "broken", lambda tensors: tensors.update({key: tensors[key][:5]})))
    assert key in message
    assert str((5, I if part == "down_proj" else H)) in message


@pytest.mark.parametrize("ignore", [False, True])
def test_experts_that_all_have_another_shape_are_never_random(whole, tmp_path, ignore):
    def change(tensors):
        tensors.update({key: t[:5] for key, t in tensors.items() if "experts" in key and "down_proj" in key})

    broken = rewrite(whole, tmp_path / "broken", change)
    message = error_of(broken, ignore_mismatched_sizes=ignore)
    assert f"{LAYER}down_proj {(E, 5, I)}, not {(E, H, I)}" in message


@pytest.mark.parametrize("length", [-1, 100, 4, 0])
def test_truncated_file_is_named(whole, tmp_path, length):
    broken = shutil.copytree(whole, tmp_path / "broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:length])
    assert "a file 'model.safetensors' that cannot be read" in error_of(broken.parent)


def test_truncated_shard_is_named(sharded):
    (shard,) = sharded.glob(f"{SHARD}*")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"a file {shard.name!r} that cannot be read" in error_of(sharded)


def test_missing_shard_is_named(sharded):
    (shard,) = sharded.glob(f"{SHARD}*")
    shard.unlink()
    assert f"lacks the file {shard.name!r}" in error_of(sharded)


def test_truncated_index_is_an_error(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-40])
    assert "an index that cannot be read" in error_of(sharded)


def test_shard_that_lacks_what_the_index_promises_is_seen(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    key = f"{LAYER}3.up_proj.weight"
    file = sharded / index[key]
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file, {"format": "pt"})
    assert f"lacks expert weights: {key}" in error_of(sharded)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_vl_moe", "nemotron_h"])
def test_other_names_on_disk_are_named_as_they_are_there(tmp_path, name):
    build(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(key for key in tensors if ".experts" in key)
    del tensors[key]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(moetor.CheckpointError) as caught:
        auto_class(name, moetor).from_pretrained(tmp_path)
    assert f"lacks expert weights: {key}" in str(caught.value)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj_bias"])
def test_missing_part_of_stacked_experts_is_named(tmp_path, part):
    build("gpt_oss").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{LAYER}{part}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert f"lacks expert weights: {LAYER}{part}" in error_of(tmp_path)


def test_missing_tensor_outside_the_experts_is_as_in_transformers(whole, tmp_path):
    key = "model.layers.1.mlp.gate.weight"
    broken = rewrite(whole, tmp_path / "broken", lambda tensors: tensors.pop(key))
    model, info = moetor.AutoModelForCausalLM.from_pretrained(broken, output_loading_info=True)
    assert info["missing_keys"] == {key}
    assert model.get_experts_implementation() == {"": "auto"}


def test_another_shape_outside_the_experts_is_an_error_unless_it_is_to_be_ignored(whole, tmp_path):
    broken = rewrite(whole, tmp_path / "broken", lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:5]}))
    assert "has another shape than the model for lm_head.weight (5, 32), not (64, 32)" in error_of(broken)
    model = moetor.AutoModelForCausalLM.from_pretrained(broken, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape == (64, H)


def test_errors_that_are_not_the_checkpoints_pass_as_they_are(whole, tmp_path):
    (shutil.copytree(whole, tmp_path / "empty") / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named"):
        moetor.AutoModelForCausalLM.from_pretrained(tmp_path / "empty")
    with pytest.raises(OSError):
        moetor.AutoModelForCausalLM.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no_such_attention"):
        moetor.AutoModelForCausalLM.from_pretrained(whole, attn_implementation="no_such_attention")
