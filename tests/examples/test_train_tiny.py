"""The tiny model's training: the same on every backend, and the same twice."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 40


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))  # the script imports its neighbours by name
    try:
        spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLES / "train_tiny.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


@pytest.fixture(scope="module")
def text(script: ModuleType) -> tuple[bytes, bytes]:
    return script.load_text()


def losses(script: ModuleType, text: bytes, backend: str) -> list[float]:
    model = script.build_model(backend, seed=0)
    return script.train(model, text, STEPS, batch_size=2, seq_length=64, lr=2e-3, seed=0)


def test_backends_train_alike_and_eager_twice_to_the_bit(script: ModuleType, text: tuple[bytes, bytes]) -> None:
    eager, again, grouped = (losses(script, text[0], name) for name in ("eager", "eager", "grouped_mm"))
    assert eager == again
    assert max(abs(a - b) for a, b in zip(eager[:10], grouped[:10], strict=True)) <= 1e-5
    assert sum(grouped[-20:]) / 20 == pytest.approx(sum(eager[-20:]) / 20, rel=0.02)
    assert eager[-1] < eager[0] - 1  # and it learns


def test_held_out_text_is_not_in_the_training_text(script: ModuleType, text: tuple[bytes, bytes]) -> None:
    train, heldout = text
    assert len(heldout) == 60_000
    paragraphs = [p for p in heldout.split(b"\n\n") if len(p) > 200]
    assert len(paragraphs) > 50
    edges = 2 * 15  # a block begins and ends inside a paragraph
    assert sum(paragraph in train for paragraph in paragraphs) <= edges // 4


def test_tokenizer_gives_back_any_text(script: ModuleType) -> None:
    tokenizer = script.build_tokenizer()
    for text in ("Return the list.\n", "naïve — ünïcödé ✓", "\t\x00\x7f  x"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=False) == text
