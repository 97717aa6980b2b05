"""The code on the pages that people write from: run as it stands there, on tiny models under the names that it uses."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moetor
from moetor import ExpertsInterface
from moetor.testing import Case, check_backend, contract_cases

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from .integrations.transformers.models import CONFIGS, build

# PEFT asks the model for it, and transformers 5.24 has another name for it
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ROOT = Path(__file__).parents[1]
TINY = ROOT / "moetor" / "assets" / "tiny"
TEXT_MODEL, VISION_MODEL = "Qwen/Qwen1.5-MoE-A2.7B", "Qwen/Qwen3-VL-30B-A3B-Instruct"


def blocks(page: str, heading: str = "") -> list[str]:
    """The Python of a page, or of the part of it below one heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    part = text[text.index(f"\n## {heading}\n") + 1 :] if heading else text
    if heading and "\n## " in part:
        part = part[: part.index("\n## ")]
    return re.findall(r"^```python\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)


def run(codes: list[str], names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run blocks one after another, as a reader would; what they leave by name."""
    names = {} if names is None else names
    for code in codes:
        exec(compile(code, "<page>", "exec"), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models in folders that are called as the models on the hub."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)  # it is made before the fixture that seeds each test
    config = CONFIGS["qwen2_moe"]()
    config.vocab_size = 257  # the bytes of the tiny tokenizer
    build("qwen2_moe", config).save_pretrained(root / TEXT_MODEL)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(root / TEXT_MODEL)
    build("qwen3_vl_moe").save_pretrained(root / VISION_MODEL)
    return root


@pytest.fixture
def models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where the test runs."""
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def strangers() -> Iterator[None]:
    """Backends that a page registers are forgotten after it."""
    before = set(ExpertsInterface.names())
    yield
    for name in set(ExpertsInterface.names()) - before:
        ExpertsInterface.unregister(name)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 27).view(2, 12), use_cache=False).logits.float()


def compile_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """inductor takes 40 s to tune the tiny model; what Dynamo traces is the same for every backend."""
    if backend != "inductor":
        original = torch.compile
        monkeypatch.setattr(torch, "compile", lambda fn, mode: original(fn, backend=backend))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_snippets_of_transformers_run_with_the_import_changed(compiler, models, monkeypatch, capsys):
    codes = blocks("docs/coming_from_transformers.md")
    assert len(codes) == 6
    names = run(codes[:1])
    assert names["model"].get_experts_implementation() == {"": "eager"}

    run(codes[1:2], names)
    (promised,) = re.findall(r"# (\{.*\})", codes[1])
    assert ast.literal_eval(capsys.readouterr().out) == ast.literal_eval(promised)

    compile_by(compiler, monkeypatch)
    torch._dynamo.reset()
    run(codes[2:3], names)
    assert capsys.readouterr().out.startswith("A mixture of experts is")
    assert names["outputs"].shape[1] > names["inputs"].input_ids.shape[1]
    # in the page's own dtype: in another one a router may choose other experts
    plain = moetor.AutoModelForCausalLM.from_pretrained(TEXT_MODEL, dtype="bfloat16", experts_implementation="eager")
    compiled, expected = logits(names["model"]), logits(plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    assert (compiled - expected).norm() <= 3e-2 * expected.norm()

    run(codes[3:4], names)
    assert names["model"] is names["plain"]
    assert names["model"].get_experts_implementation() == {"": "grouped_mm"}
    assert "grouped_mm -> grouped_mm" in capsys.readouterr().out

    before = names.pop("outputs")
    run(codes[4:5], names)
    assert torch.equal(names["outputs"], before)

    run(codes[5:], names)
    assert names["model"].get_experts_implementation() == {"": "moetor:grouped_mm"}
    assert (logits(names["model"]) - expected).norm() <= 3e-2 * expected.norm()


def test_backend_of_the_page_passes_the_contract_and_runs(strangers, capsys):
    codes = blocks("docs/writing_a_backend.md")
    names = run(codes)
    printed = capsys.readouterr().out
    passed, refused = map(int, re.search(r"every_expert: (\d+) passed, 0 failed, (\d+) refused", printed).groups())
    # it refuses what the page says that it refuses, and runs all the rest
    runs = [c for c in contract_cases() if (c.format, c.layout == "list") == ("dense", False)]
    assert passed == sum(c.dtype != torch.float16 for c in runs)
    assert passed + refused == len(contract_cases())
    exact = moetor.experts_forward(names["weights"], x := torch.randn(2, 32), names["ids"], names["shares"], "eager")
    torch.testing.assert_close(
        moetor.experts_forward(names["weights"], x, names["ids"], names["shares"], "every_expert"),
        exact,
        rtol=1e-4,
        atol=1e-3,
    )
    assert "at most 16384 such pairs, got 20000" in printed


MISTAKES = {
    "a bias left out": ("if bias_EN is None:", "if True:"),
    "a slot twice": ("share_TE.scatter_add(", "share_TE.scatter("),
    "the norm left out": ("weights.after_down(rows_ETH)", "rows_ETH"),
    "a column too few": ("[:, :E]\n    chosen", "[:, :E].roll(1, 0)\n    chosen"),
    "the weights in half precision": ("wide = torch.promote_types(dtype, torch.float32)", "wide = torch.bfloat16"),
}


def fails(backend: str, case: Case) -> bool:
    try:
        check_backend(backend, [case])
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("mistake", MISTAKES)
def test_contract_finds_a_mistake_in_the_page(mistake, strangers):
    right, wrong = MISTAKES[mistake]
    codes = blocks("docs/writing_a_backend.md")[:2]
    assert right in codes[0]
    names = run([codes[0].replace(right, wrong), codes[1]])
    reasons = {"machine_why_not": names["machine_why_not"], "why_not": names["why_not"]}
    ExpertsInterface.register("mistaken", moetor.Backend("mistaken", names["forward"], **reasons))
    assert any(fails("mistaken", case) for case in contract_cases())


def test_own_block_of_the_readme_trains():
    names = run(blocks("README.md", "Models of your own"))
    assert names["y"].shape == (2, 10, 256)
    names["loss"].backward()
    assert all(parameter.grad is not None for parameter in names["block"].parameters())


def test_lora_of_the_readme_trains_its_factors_alone(models):
    pytest.importorskip("peft")
    model = run(blocks("README.md", "LoRA on experts"))["model"]
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    ids = torch.arange(3, 27).view(2, 12)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    factors = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len({name for name in factors if ".experts." in name}) == 2 * 2 * 2  # A and B of two parameters, two layers
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == factors


def test_readme_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page.name, target)


def test_pages_are_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme] == []
