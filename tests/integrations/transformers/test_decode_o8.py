"""Acceptance case O8: prefill, decode, exception, restore. On a CPU the rule's device is forced."""

import threading

import pytest
import torch

import moetor
from moetor.integrations.transformers import without_decode_switch

from .models import build
from .phases import Criterion, Ran

PROMPT, STEPS = 40, 5


class Stop(Exception):
    """Raised inside a step."""


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe"])
def test_o8_prefill_decode_exception_restore(name: str, num_beams: int, decodes: None, ran: Ran) -> None:
    model = moetor.attach(build(name), "grouped_mm")
    before = model.get_experts_implementation()
    prompt = torch.randint(3, 48, (1, PROMPT))

    def generate(look) -> torch.Tensor:
        options = {"num_beams": num_beams, "do_sample": False, "eos_token_id": None}
        return model.generate(prompt, max_new_tokens=STEPS, stopping_criteria=[Criterion(look)], **options)

    def effective() -> str:
        """What runs outside of every phase."""
        ran.take()
        model(input_ids=prompt)
        return ran.names()[0]

    def restored() -> bool:
        return model.get_experts_implementation() == before and effective() == "grouped_mm"

    with without_decode_switch():
        expected = generate(lambda: None)
    ran.take()
    steps: list[str] = []

    def note() -> None:
        steps.append(model.get_experts_implementation()[""])

    assert torch.equal(generate(note), expected)
    assert ran.take() == [("grouped_mm", PROMPT * num_beams)] * 2 + [("batched_mm", num_beams)] * 2 * (STEPS - 1)
    assert steps == ["batched_mm"] * STEPS
    assert restored()

    def fail() -> None:
        note()
        if len(steps) == 3:
            raise Stop

    steps.clear()
    with pytest.raises(Stop):
        generate(fail)
    assert restored()
    assert torch.equal(generate(note), expected)
    assert restored()

    def nest() -> None:
        steps.clear()
        with pytest.raises(Stop):
            generate(fail)
        assert torch.equal(generate(note), expected)
        assert model.get_experts_implementation()[""] == "batched_mm"

    assert torch.equal(generate(nest), expected)
    assert restored()

    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(2)

    def run(number: int) -> None:
        steps_here: list[str] = []

        def together() -> None:
            barrier.wait(60)
            steps_here.append(model.get_experts_implementation()[""])
            if number and len(steps_here) == STEPS - 1:
                barrier.abort()
                raise Stop

        try:
            results[number] = generate(together)
        except (Stop, threading.BrokenBarrierError):
            results[number] = generate(note)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(results[number], expected) for number in range(2))
    assert restored()
