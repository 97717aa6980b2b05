"""Which backend runs: chosen at load, per sub-config and at run time, and asked for."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config

import moetor
from moetor.integrations.transformers.adapters import is_experts
from moetor.integrations.transformers.choice import backend_of

from .backends import ON_CPU
from .models import CONFIGS, auto_class, build, dense, logits, tokens

# Of qwen3_omni_moe, three levels deep.
WITH_EXPERTS = {"", "thinker_config", "thinker_config.text_config", "talker_config", "talker_config.text_config"}
WITHOUT_EXPERTS = {
    "thinker_config.vision_config",
    "thinker_config.audio_config",
    "talker_config.code_predictor_config",
    "code2wav_config",
}


def make(name, experts_implementation="auto"):
    return auto_class(name, moetor).from_config(CONFIGS[name](), experts_implementation=experts_implementation).eval()


def running(module):
    """The backends of the experts below a module."""
    return {backend_of(experts) for experts in module.modules() if is_experts(experts)}


@pytest.fixture
def needs_sm90():
    """A stranger's backend that no CPU machine can run."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    def machine_why_not(device):
        return None if device.type == "cuda" else f"needs a GPU of compute capability 9.0, got {device.type}"

    def forward(*_):
        raise AssertionError("ran although it was refused")

    moetor.ExpertsInterface.register("sm90", moetor.Backend("sm90", forward, machine_why_not=machine_why_not))
    yield "sm90"
    moetor.ExpertsInterface.unregister("sm90")


def test_default_is_auto():
    assert make("qwen3_moe").get_experts_implementation() == {"": "auto"}


@pytest.mark.parametrize("backend", ON_CPU)
def test_choice_at_load_and_at_run_time_are_the_same(backend):
    model, other = make("qwen3_moe", backend), make("qwen3_moe")
    other.set_experts_implementation(backend)
    assert model.get_experts_implementation() == other.get_experts_implementation() == {"": backend}
    assert running(model) == running(other) == {backend}


def test_choice_is_what_runs(zeros):
    model = make("qwen3_moe")
    with torch.no_grad():
        before = logits(model, tokens())
        model.set_experts_implementation(zeros)
        silenced = logits(model, tokens())
        model.set_experts_implementation("batched_mm")
        after = logits(model, tokens())
    assert not torch.allclose(before, silenced)
    torch.testing.assert_close(before, after)


def test_empty_key_reaches_the_text_experts_of_a_vision_language_model():
    model = make("qwen3_vl_moe", {"": "batched_mm"})
    assert running(model) == {"batched_mm"}
    expected = {"": "batched_mm", "text_config": "batched_mm", "vision_config": "eager"}
    assert model.get_experts_implementation() == expected


def test_a_named_key_wins_over_the_empty_one():
    model = make("qwen3_vl_moe", {"": "batched_mm", "text_config": "grouped_mm"})
    assert running(model) == {"grouped_mm"}


def test_key_of_three_levels_reaches_only_its_own():
    model = make("qwen3_omni_moe", {"thinker_config.text_config": "batched_mm"})
    assert running(model.thinker) == {"batched_mm"}
    assert running(model.talker) == {"auto"}
    model.set_experts_implementation({"talker_config": "grouped_mm"})
    assert running(model.thinker) == {"batched_mm"}
    assert running(model.talker) == {"grouped_mm"}


@pytest.mark.parametrize(
    "choice",
    [
        "grouped_mm",
        {"thinker_config.text_config": "batched_mm"},
        {"thinker_config": "eager", "talker_config.text_config": "grouped_mm"},
        {"": "grouped_mm", "thinker_config.text_config": "eager"},
        {"": "eager", "talker_config": "batched_mm", "talker_config.text_config": "grouped_mm"},
    ],
    ids=str,
)
def test_get_and_set_round_trip_at_three_levels(choice):
    model = make("qwen3_omni_moe", choice)
    state = model.get_experts_implementation()
    assert set(state) == WITH_EXPERTS | WITHOUT_EXPERTS
    assert all(state[key] == "eager" for key in WITHOUT_EXPERTS)
    ran = running(model.thinker), running(model.talker)
    model.set_experts_implementation("auto")
    model.set_experts_implementation(state)
    assert model.get_experts_implementation() == state
    assert (running(model.thinker), running(model.talker)) == ran


def test_nested_models_have_the_methods_and_keys_of_their_own():
    model = make("qwen3_omni_moe")
    model.thinker.set_experts_implementation({"text_config": "batched_mm"})
    assert model.thinker.get_experts_implementation()["text_config"] == "batched_mm"
    assert model.get_experts_implementation()["thinker_config.text_config"] == "batched_mm"
    model.talker.model.set_experts_implementation("grouped_mm")
    assert model.talker.model.get_experts_implementation() == {"": "grouped_mm"}
    assert running(model.talker) == {"grouped_mm"}
    assert running(model.thinker) == {"batched_mm"}


def test_two_models_of_one_config_object_choose_apart():
    config = CONFIGS["qwen3_moe"]()
    before = copy.deepcopy(config.to_dict())
    one = moetor.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    two = moetor.AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm")
    plain = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    one.set_experts_implementation("eager")
    assert (running(one), running(two), running(plain)) == ({"eager"}, {"batched_mm"}, {"eager"})
    two.set_experts_implementation("grouped_mm")
    assert (running(one), running(two), running(plain)) == ({"eager"}, {"grouped_mm"}, {"eager"})
    assert config.to_dict() == before


def test_models_that_share_even_the_model_config_choose_apart():
    plain = build("qwen3_moe")
    one, two = type(plain)(plain.config), type(plain)(plain.config)
    assert one.config is two.config
    state = dict(vars(plain.config))
    moetor.attach(one, "grouped_mm")
    moetor.attach(two, "batched_mm")
    assert (running(one), running(two), running(plain)) == ({"grouped_mm"}, {"batched_mm"}, {"eager"})
    assert vars(plain.config) == state


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm", "auto"])
def test_a_part_without_experts_accepts_only_eager(name):
    model = make("qwen3_vl_moe", "grouped_mm")
    before = model.get_experts_implementation()
    if name == "eager":
        model.set_experts_implementation({"vision_config": name})
    else:
        with pytest.raises(moetor.InvalidInput, match="'vision_config'.*no experts.*'eager'"):
            model.set_experts_implementation({"vision_config": name, "text_config": "eager"})
    assert model.get_experts_implementation() == before
    assert before["vision_config"] == "eager"


def refusals(choice, error, match, config, path):
    """The choice is refused wherever it can be made, and an attached model stays as it was."""
    loaders = moetor.AutoModelForCausalLM
    with pytest.raises(error, match=match):
        loaders.from_config(config, experts_implementation=choice)
    with pytest.raises(error, match=match):
        loaders.from_pretrained(path, experts_implementation=choice)
    plain = AutoModelForCausalLM.from_config(config)
    cls, state = type(plain), [dict(vars(module)) for module in plain.modules() if is_experts(module)]
    with pytest.raises(error, match=match):
        moetor.attach(plain, choice)
    assert type(plain) is cls
    assert [vars(module) for module in plain.modules() if is_experts(module)] == state
    model = loaders.from_config(config)
    before = model.get_experts_implementation()
    with pytest.raises(error, match=match):
        model.set_experts_implementation(choice)
    assert model.get_experts_implementation() == before


@pytest.fixture
def weightless(tmp_path):
    """A checkpoint without weights: whatever is refused there is refused before they are read."""
    CONFIGS["qwen3_moe"]().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("choice", "error", "match"),
    [
        ("gruped_mm", moetor.UnknownBackend, "unknown experts backend 'gruped_mm'; did you mean 'grouped_mm'"),
        ({"": "deepgem"}, moetor.UnknownBackend, "unknown experts backend 'deepgem'"),
        ({"text_confg": "eager"}, moetor.UnknownBackend, "unknown sub-config 'text_confg'; known: \"\"$"),
        (3, moetor.InvalidInput, "got int 3"),
        (None, moetor.InvalidInput, "got NoneType"),
        ({"": 3}, moetor.InvalidInput, "got dict"),
    ],
    ids=str,
)
def test_choice_that_makes_no_sense_is_refused_everywhere(choice, error, match, weightless):
    refusals(choice, error, match, CONFIGS["qwen3_moe"](), weightless)


def test_backend_of_other_machines_is_refused_at_selection(needs_sm90, weightless):
    match = "'sm90' cannot run on this machine: cpu: needs a GPU of compute capability 9.0"
    for choice in (needs_sm90, {"": needs_sm90}):
        refusals(choice, moetor.BackendUnavailable, match, CONFIGS["qwen3_moe"](), weightless)
    assert issubclass(moetor.BackendUnavailable, ImportError)


def test_one_bad_entry_changes_nothing():
    model = make("qwen3_omni_moe", "grouped_mm")
    before = model.get_experts_implementation()
    for bad in ({"talker_config.text_confg": "eager"}, {"talker_config": "eagr"}, {"code2wav_config": "batched_mm"}):
        with pytest.raises(ValueError):
            model.set_experts_implementation({"thinker_config": "batched_mm", **bad})
        assert model.get_experts_implementation() == before


def test_unknown_key_names_near_ones():
    with pytest.raises(moetor.UnknownBackend, match=r"did you mean 'thinker_config.text_config'"):
        make("qwen3_omni_moe", {"thinker_config.text_confg": "eager"})


def test_dense_model_loads_and_runs_as_before(tmp_path):
    plain = AutoModelForCausalLM.from_config(dense())
    plain.save_pretrained(tmp_path)
    for keywords in ({}, {"experts_implementation": "eager"}):
        model = moetor.AutoModelForCausalLM.from_pretrained(tmp_path, **keywords)
        assert torch.equal(logits(model, tokens()), logits(plain, tokens()))
        assert model.get_experts_implementation() == {"": "eager"}
        model.set_experts_implementation(model.get_experts_implementation())
        assert "has no experts" in str(model.explain_experts())


@pytest.mark.parametrize("choice", ["grouped_mm", {"": "batched_mm"}], ids=str)
def test_dense_model_refuses_every_backend_but_eager(choice, tmp_path):
    dense().save_pretrained(tmp_path)
    refusals(choice, moetor.InvalidInput, "LlamaForCausalLM has no experts", dense(), tmp_path)


def test_model_that_transformers_loaded_can_be_attached_and_chosen_again():
    plain = build("qwen3_moe")
    with torch.no_grad():
        expected = logits(plain, tokens())
    model = moetor.attach(plain, "batched_mm")
    assert model is plain
    with torch.no_grad():
        torch.testing.assert_close(logits(model, tokens()), expected, rtol=1e-5, atol=1e-5)
    cls = type(model)
    assert type(moetor.attach(model, "grouped_mm")) is cls
    assert model.get_experts_implementation() == {"": "grouped_mm"}


@pytest.mark.parametrize("thing", [None, "qwen3_moe", torch.nn.Linear(2, 2)], ids=lambda thing: type(thing).__name__)
def test_attach_takes_only_transformers_models(thing):
    with pytest.raises(moetor.InvalidInput, match=f"PreTrainedModel, got {type(thing).__name__}"):
        moetor.attach(thing)


def test_auto_class_without_a_head_and_encoder_decoder_models_load():
    model = moetor.AutoModel.from_config(CONFIGS["qwen3_moe"](), experts_implementation="batched_mm")
    assert (type(model).__name__, model.get_experts_implementation()) == ("Qwen3MoeModel", {"": "batched_mm"})
    small = T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=32)
    model = moetor.AutoModelForSeq2SeqLM.from_config(small)
    assert model.get_experts_implementation() == {"": "eager"}


def test_auto_classes_are_not_made_by_calling():
    with pytest.raises(OSError, match="from_pretrained"):
        moetor.AutoModel()


def test_generate_leaves_the_choice_alone():
    model = make("qwen3_moe", "grouped_mm")
    seen = []

    def look(input_ids, scores):
        seen.append(model.get_experts_implementation())
        return scores

    model.generate(tokens(5), max_new_tokens=4, do_sample=False, logits_processor=[look], eos_token_id=None)
    assert seen == [{"": "grouped_mm"}] * 4
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_explanation_says_what_runs_and_why_others_do_not(needs_sm90):
    model = make("qwen3_omni_moe", {"thinker_config": "batched_mm"})
    explanation = model.explain_experts()
    parts = {part.key: part for part in explanation.parts}
    assert set(parts) == {"thinker_config.text_config", "talker_config.text_config"}
    for key, chosen in (("thinker_config.text_config", "batched_mm"), ("talker_config.text_config", "fused")):
        assert parts[key].layers == 2
        for why in parts[key].by_tokens.values():
            assert why.chosen == chosen
            assert why.reasons["sm90"] == "needs a GPU of compute capability 9.0, got cpu"
            assert why.reasons["eager"] is None
    assert "8 experts, top 2, 32 to 24, float32 on cpu" in str(explanation)
    assert json.loads(json.dumps(explanation.as_dict()))["model"] == "Qwen3OmniMoeForConditionalGeneration"
