"""The decode phase: grouped_mm gives way to batched_mm while `generate` decodes; nothing else, at no other time."""

import copy
import inspect
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from transformers import PreTrainedModel

import moetor
from moetor import forward
from moetor.backends import auto, batched_mm
from moetor.core.cost import bytes_per_expert
from moetor.integrations.transformers import decode, experts_of, without_decode_switch
from moetor.integrations.transformers.methods import run_experts
from moetor.testing import contract_cases, make_inputs
from moetor.testing.contract import refusal

from .models import K, build, logits, tokens
from .phases import Criterion, Streamer

SWITCHED = ["grouped_mm", "batched_mm"]
LAYERS = 2

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 5},
    "static cache": {"cache_implementation": "static"},
}


def make(name: str = "qwen3_moe", choice: object = "grouped_mm") -> PreTrainedModel:
    return moetor.attach(build(name), choice)


def generate(model: PreTrainedModel, num: int = 5, batch: int = 2, **options: object) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"max_new_tokens": num, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(tokens()[:batch], **options)


def name_of(model: PreTrainedModel) -> str:
    return model.get_experts_implementation()[""]


@pytest.mark.parametrize("mode", MODES)
def test_prefill_and_decoding_run_their_own_backends(mode, decodes, ran):
    model, batch = make(), 1 if mode == "prompt lookup" else 2
    with without_decode_switch():
        expected = generate(model, batch=batch, **MODES[mode])
    assert ran.names() == ["grouped_mm"]
    found = generate(model, batch=batch, **MODES[mode])
    assert ran.names() == SWITCHED
    assert torch.equal(found, expected)
    assert name_of(model) == "grouped_mm"
    logits(model, tokens())
    assert ran.names() == ["grouped_mm"]


def test_prefill_is_the_prompt_in_all_its_chunks(decodes, ran):
    model = make()
    generate(model, 3)
    assert ran.take() == [("grouped_mm", 24)] * LAYERS + [("batched_mm", 2)] * LAYERS * 2
    generate(model, 3, prefill_chunk_size=5)
    chunks = [("grouped_mm", 2 * size) for size in (5, 5, 2) for _ in range(LAYERS)]
    assert ran.take() == chunks + [("batched_mm", 2)] * LAYERS * 2


def test_assistant_has_phases_of_its_own(decodes, ran):
    model, assistant = make(), make("mixtral")
    assistant.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    with without_decode_switch():
        expected = generate(model, 8, batch=1, assistant_model=assistant)
    for part in (model, assistant):
        criterion = Criterion(lambda: (name_of(model), name_of(assistant)))
        ran.take()
        found = generate(model, 8, batch=1, assistant_model=assistant, stopping_criteria=[criterion])
        assert ran.names(part) == SWITCHED  # the second draft goes on from the cache of the first: it has no prefill
        assert torch.equal(found, expected)
        # The model's criterion, called between drafts; older releases also ask it about the first draft.
        assert criterion.seen[-1] == ("batched_mm", "grouped_mm")
        assert set(criterion.seen[:-1]) <= {("batched_mm", "grouped_mm"), ("grouped_mm", "grouped_mm")}
    assert (name_of(model), name_of(assistant)) == ("grouped_mm", "grouped_mm")


def test_early_exit_assistant_which_is_the_model_itself(decodes, ran):
    model = make()
    model.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    generate(model, 8, batch=1, assistant_early_exit=1)
    assert ran.names() == SWITCHED * 2  # the first draft, and the model that checks it
    assert name_of(model) == "grouped_mm"


def test_streamer_and_criterion_see_what_runs(decodes):
    model = make()
    streamer, criterion = (kind(lambda: name_of(model)) for kind in (Streamer, Criterion))
    generate(model, 4, streamer=streamer, stopping_criteria=[criterion])
    assert streamer.seen == ["grouped_mm"] + ["batched_mm"] * 4  # the prompt comes first
    assert criterion.seen == ["batched_mm"] * 4
    criterion.seen.clear()
    generate(model, 4, num_beams=2, stopping_criteria=[criterion])
    assert criterion.seen == ["batched_mm"] * 4


@pytest.mark.parametrize("name", ["auto", "eager", "batched_mm"])
def test_other_entries_run_as_chosen(name, decodes, ran):
    model = make(choice=name)
    criterion = Criterion(lambda: name_of(model))
    generate(model, stopping_criteria=[criterion])
    assert ran.names() == ["fused" if name == "auto" else name]
    assert set(criterion.seen) == {name}


def test_nothing_switches_on_a_cpu(ran):
    model = make()
    criterion = Criterion(lambda: name_of(model))
    generate(model, stopping_criteria=[criterion])
    assert ran.names() == ["grouped_mm"]
    assert set(criterion.seen) == {"grouped_mm"}
    assert decode.switches_on(torch.device("cuda"))


def test_nested_experts_switch_under_every_key_that_reaches_them(decodes, ran):
    model = make("qwen3_vl_moe")
    before = model.get_experts_implementation()
    criterion = Criterion(model.get_experts_implementation)
    generate(model, stopping_criteria=[criterion])
    assert ran.names() == SWITCHED
    assert criterion.seen == [{"": "batched_mm", "text_config": "batched_mm", "vision_config": "eager"}] * 5
    assert model.get_experts_implementation() == before


def test_only_the_part_that_generates_switches_at_three_levels(decodes, ran):
    model = make("qwen3_omni_moe")
    before = model.get_experts_implementation()
    criterion = Criterion(model.get_experts_implementation)
    generate(model.thinker, stopping_criteria=[criterion])
    assert ran.names() == SWITCHED
    inside = {**before, "": "eager", "thinker_config": "batched_mm", "thinker_config.text_config": "batched_mm"}
    assert criterion.seen == [inside] * 5
    assert model.get_experts_implementation() == before


def test_entries_are_chosen_apart_at_three_levels(decodes, ran):
    model = make("qwen3_omni_moe", {"": "grouped_mm", "thinker_config.text_config": "eager"})
    criterion = Criterion(model.get_experts_implementation)
    generate(model.thinker, stopping_criteria=[criterion])
    assert ran.names() == ["eager"]
    assert criterion.seen == [model.get_experts_implementation()] * 5


def test_phase_of_an_attached_model_inside_one_that_is_not(decodes, ran):
    outer = build("qwen3_vl_moe")
    moetor.attach(outer.model.language_model, "grouped_mm")
    generate(outer)
    assert ran.names() == SWITCHED


class Stop(Exception):
    """What a user's callback may raise."""


def test_exception_ends_the_phase(decodes, ran):
    model, other = make(), make("mixtral")
    steps = []

    def fail():
        steps.append(name_of(model))
        if len(steps) == 3:
            raise Stop

    for options in ({"stopping_criteria": [Criterion(fail)]}, {"streamer": Streamer(fail)}):
        with pytest.raises(Stop):
            generate(model, **options)
        assert steps[-1] == "batched_mm"
        assert name_of(model) == "grouped_mm"
        ran.take()
        logits(model, tokens())
        assert ran.names() == ["grouped_mm"]
        steps.clear()

    def fail_inside():
        steps.append(name_of(model))
        if len(steps) == 2:
            with pytest.raises(Stop):
                generate(other, stopping_criteria=[Criterion(fail)])
            steps.append(name_of(model))

    steps = []
    fail_inside_criterion = Criterion(fail_inside)
    generate(model, 4, stopping_criteria=[fail_inside_criterion])
    assert set(steps) == {"batched_mm"}
    assert (name_of(model), name_of(other)) == ("grouped_mm", "grouped_mm")


def test_exception_in_the_prefill_leaves_nothing(decodes, ran):
    model = make()
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, max_new_tokens=0)
    assert (decode._thread.model, decode._thread.decoding, decode._thread.pairs) == (None, frozenset(), {})


@pytest.mark.parametrize("same", [True, False], ids=["the same model", "another model"])
def test_nested_generate_begins_with_a_prefill_and_leaves_the_outer_phase(same, decodes, ran):
    model = make()
    inner = model if same else make("mixtral")
    names = []

    def nest():
        ran.take()
        criterion = Criterion(lambda: names.append((name_of(model), name_of(inner))))
        generate(inner, 3, stopping_criteria=[criterion])
        assert ran.names() == SWITCHED
        return name_of(model), name_of(inner)

    criterion = Criterion(nest)
    generate(model, 3, stopping_criteria=[criterion])
    assert ran.names() == []  # the last calls were those of nest
    assert criterion.seen == [("batched_mm", "batched_mm" if same else "grouped_mm")] * 3
    assert set(names) == {("batched_mm", "batched_mm")}
    assert name_of(model) == "grouped_mm"


def test_plain_call_of_another_model_is_in_no_phase(decodes, ran):
    model, other = make(), make()
    twin = copy.deepcopy(model)

    def look():
        ran.take()
        for judge in (other, twin):
            logits(judge, tokens())
        return ran.names(), name_of(other), name_of(twin)

    for _ in range(2):
        criterion = Criterion(look)
        generate(model, 3, stopping_criteria=[criterion])
        assert criterion.seen == [(["grouped_mm"], "grouped_mm", "grouped_mm")] * 3
        twin = copy.deepcopy(model)  # of a model that has generated


def test_threads_have_phases_of_their_own(decodes):
    model = make()
    decoding, looked = threading.Event(), threading.Event()
    seen = []

    def wait():
        decoding.set()
        looked.wait(60)
        return name_of(model)

    criterion = Criterion(wait)
    thread = threading.Thread(target=lambda: seen.append(generate(model, stopping_criteria=[criterion])))
    thread.start()
    assert decoding.wait(60)
    try:
        assert name_of(model) == "grouped_mm"
        mine = Criterion(lambda: name_of(model))
        found = generate(model, stopping_criteria=[mine])
        assert name_of(model) == "grouped_mm"
    finally:
        looked.set()
        thread.join(60)
    assert mine.seen == criterion.seen == ["batched_mm"] * 5
    assert torch.equal(seen[0], found)
    assert name_of(model) == "grouped_mm"


@pytest.mark.parametrize("batch", [1, 2])
def test_bytes_gathered_decide_too(batch, decodes, ran, monkeypatch):
    model = make()
    expert_bytes = bytes_per_expert(experts_of(model.model.layers[0].mlp.experts))
    monkeypatch.setattr(auto, "GATHERED_BYTES", K * expert_bytes)
    criterion = Criterion(lambda: name_of(model))
    generate(model, batch=batch, stopping_criteria=[criterion])
    assert ran.names() == (SWITCHED if batch == 1 else ["grouped_mm"])
    assert set(criterion.seen) == {"batched_mm" if batch == 1 else "grouped_mm"}
    ran.take()
    generate(model, batch=batch, num_beams=2)
    assert ran.names() == ["grouped_mm"]


def test_bound_of_batched_mm_holds_too(decodes, ran, monkeypatch):
    model = make()
    monkeypatch.setattr(batched_mm, "GATHER_BYTES", 1)
    generate(model)
    assert ran.names() == ["grouped_mm"]


def test_batched_mm_takes_what_grouped_mm_takes():
    for case in contract_cases():
        inputs = make_inputs(case)
        if refusal("grouped_mm", inputs) is None:
            assert refusal("batched_mm", inputs) is None


def test_without_a_cache_every_step_is_a_prefill(decodes, ran):
    model = make()
    criterion = Criterion(lambda: name_of(model))
    generate(model, use_cache=False, stopping_criteria=[criterion])
    assert ran.names() == ["grouped_mm"]
    assert set(criterion.seen) == {"grouped_mm"}


def test_opting_out_holds_for_its_block_and_thread(decodes, ran):
    model = make()
    criterion = Criterion(lambda: name_of(model))
    with without_decode_switch():
        with pytest.raises(Stop), without_decode_switch():
            raise Stop
        generate(model, stopping_criteria=[criterion])
        assert ran.names() == ["grouped_mm"]
        assert set(criterion.seen) == {"grouped_mm"}
        thread = threading.Thread(target=generate, args=(model,))
        thread.start()
        thread.join()
        assert ran.names() == SWITCHED
    generate(model)
    assert ran.names() == SWITCHED


def test_moetor_experts_wins(decodes, ran, monkeypatch):
    model = make()
    for name in ("eager", "grouped_mm"):
        monkeypatch.setattr(forward, "OVERRIDE", name)
        criterion = Criterion(lambda: name_of(model))
        generate(model, stopping_criteria=[criterion])
        assert ran.names() == [name]
        assert set(criterion.seen) == {"grouped_mm"}


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["MOETOR_DECODE_SWITCH=0", "MOETOR_EXPERTS=grouped_mm"])
def test_environment_keeps_the_backend(variable):
    script = (
        "from moetor.integrations.transformers import decode; decode.switches_on = lambda device: True\n"
        "from tests.integrations.transformers.phases import watched\n"
        "from tests.integrations.transformers.test_decode import generate, make\n"
        "with watched() as ran:\n"
        "    generate(make()); assert ran.names() == ['grouped_mm']\n"
    )
    environment = {**os.environ, **dict([variable.split("=")]), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_choice_made_inside_generate_is_the_users(decodes, ran):
    model = make()
    choices = iter(["eager", "grouped_mm", "eager", None])

    def choose():
        if (name := next(choices)) is not None:
            model.set_experts_implementation(name)
        return name_of(model)

    criterion = Criterion(choose)
    generate(model, 4, stopping_criteria=[criterion])
    assert criterion.seen == ["eager", "batched_mm", "eager", "eager"]
    assert ran.names() == ["grouped_mm", "eager", "batched_mm", "eager"]
    assert name_of(model) == "eager"


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copies_made_inside_generate_are_in_no_phase(make_copy, decodes, ran):
    model = make()
    copies = []

    def look():
        copies.append(make_copy(model))
        return name_of(copies[-1])

    criterion = Criterion(look)
    found = generate(model, 3, stopping_criteria=[criterion])
    assert criterion.seen == ["grouped_mm"] * 3
    ran.take()
    assert torch.equal(generate(copies[-1], 3), found)
    assert ran.names() == SWITCHED


def test_explanation_tells_of_it(decodes):
    model = make("qwen3_vl_moe")
    part = model.explain_experts().parts[0]
    few = auto.GATHERED_BYTES // (3 * 32 * 24 * 4) // K
    assert part.decode == f"batched_mm up to {few} tokens a step, grouped_mm beyond"
    assert f"while generate decodes: batched_mm up to {few}" in str(model.explain_experts())
    assert model.explain_experts().as_dict()["parts"][0]["decode"] == part.decode
    with without_decode_switch():
        assert "switch to batched_mm is off" in str(model.explain_experts())
    model.set_experts_implementation("eager")
    assert model.explain_experts().parts[0].decode is None


def test_explanation_on_a_cpu_has_no_decode_phase():
    assert make().explain_experts().parts[0].decode is None


def test_generate_looks_as_it_did():
    method = type(make()).generate
    assert method.__qualname__ == "GenerationMixin.generate"
    assert "stopping_criteria" in inspect.signature(method).parameters


def test_cost_outside_generate_is_one_look_at_the_thread(monkeypatch):
    """No size is asked for, and no group: what a module may get later must not decide anything now."""
    model = make()
    monkeypatch.setattr(decode, "few_pairs", None)
    monkeypatch.setattr(decode, "_GROUP", None)
    experts = model.model.layers[0].mlp.experts
    run_experts(experts, torch.randn(3, 32), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K))
