"""One line a model on what runs where, at INFO on the logger "moetor", and one for each change."""

import logging

import pytest
import torch

import moetor

from .models import CONFIGS, build, dense


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    """What has been logged since the last call."""
    caplog.set_level(logging.INFO, "moetor")

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "moetor"]
        assert all(record.levelno == logging.INFO for record in caplog.records if record.name == "moetor")
        caplog.clear()
        return found

    return take


ABOUT = "(2 layers, 8 experts, top 2, 32 to 24, float32 on cpu, silu gate)"


def test_loading_says_what_runs_in_one_line(lines, tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    assert lines() == []
    auto = moetor.AutoModelForCausalLM
    for load in (auto.from_pretrained, lambda path, **choice: auto.from_config(CONFIGS["qwen3_moe"](), **choice)):
        load(tmp_path)
        assert lines() == [f"Qwen3MoeForCausalLM: experts by auto, here fused {ABOUT}"]
        load(tmp_path, experts_implementation="eager")
        assert lines() == [f"Qwen3MoeForCausalLM: experts by eager {ABOUT}"]


def test_parts_of_a_model_share_a_line(lines):
    moetor.attach(build("qwen3_omni_moe"), {"thinker_config": "batched_mm"})
    (line,) = lines()
    assert line.startswith("Qwen3OmniMoeForConditionalGeneration: thinker_config.text_config by batched_mm (2 layers")
    assert " | talker_config.text_config by auto, here fused (2 layers" in line


def test_the_same_set_up_is_said_once(lines):
    model = moetor.attach(build("qwen3_vl_moe"), "grouped_mm")
    assert len(lines()) == 1
    moetor.attach(model, "grouped_mm")
    moetor.attach(model.model, "grouped_mm")
    moetor.attach(model, {"text_config": "grouped_mm"})
    model.set_experts_implementation("grouped_mm")
    model.set_experts_implementation(model.get_experts_implementation())
    assert lines() == []


def test_change_is_said_by_key(lines):
    model = moetor.attach(build("qwen3_omni_moe"), "grouped_mm")
    lines()
    model.set_experts_implementation({"talker_config": "eager"})
    keys = ["experts grouped_mm -> eager"]  # no longer one name for the whole
    keys += [f"{key} grouped_mm -> eager" for key in ("talker_config", "talker_config.text_config")]
    assert lines() == [f"Qwen3OmniMoeForConditionalGeneration: {', '.join(keys)}"]
    with pytest.raises(ValueError):
        model.set_experts_implementation("gruped_mm")
    assert lines() == []
    moetor.attach(model.thinker, "batched_mm")
    assert lines() == [
        "Qwen3OmniMoeThinkerForConditionalGeneration: experts grouped_mm -> batched_mm,"
        " text_config grouped_mm -> batched_mm"
    ]


def test_decode_phase_is_part_of_the_line_and_makes_none(lines, decodes):
    model = moetor.attach(build("qwen3_moe"), "grouped_mm")
    (line,) = lines()
    assert line.startswith("Qwen3MoeForCausalLM: experts by grouped_mm, while generate decodes batched_mm up to ")
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
    assert lines() == []


def test_override_is_what_is_said(lines, monkeypatch):
    monkeypatch.setattr(moetor.forward, "OVERRIDE", "eager")
    moetor.attach(build("qwen3_moe"), "grouped_mm")
    assert lines() == [f"Qwen3MoeForCausalLM: experts by eager {ABOUT}"]


def test_backend_that_refuses_the_model_where_it_is(lines):
    backend = moetor.Backend("moon", lambda weights, x, ids, w: x, why_not=lambda weights, call: "needs a moon rock")
    moetor.ExpertsInterface.register("moon", backend)
    try:
        moetor.attach(build("qwen3_moe"), "moon")
    finally:
        moetor.ExpertsInterface.unregister("moon")
    assert lines() == [f"Qwen3MoeForCausalLM: experts by moon, here nothing yet (needs a moon rock) {ABOUT}"]


def test_dense_model_says_that_it_is(lines):
    moetor.AutoModelForCausalLM.from_config(dense())
    assert lines() == ["LlamaForCausalLM has no experts that moetor runs"]


def test_nothing_is_asked_when_nobody_listens(monkeypatch):
    monkeypatch.setattr(moetor.integrations.transformers.log, "explain_model", None)
    assert not logging.getLogger("moetor").isEnabledFor(logging.INFO)
    moetor.attach(build("qwen3_moe"))


def test_model_on_the_meta_device_is_described(lines):
    with torch.device("meta"):
        moetor.AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"]())
    (line,) = lines()
    assert "float32 on meta" in line
