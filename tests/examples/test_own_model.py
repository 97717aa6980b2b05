"""The model of one's own: it learns, and what it exports gives the same in a process that knows nothing of it."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "own_model.py"
# its exported program in a process of its own: other numbers of tokens, and no transformers
RELOAD = """
import sys, torch, moetor
program = torch.export.load(sys.argv[1]).module()
for ids, expected in torch.load(sys.argv[2]):
    torch.testing.assert_close(program(ids)[0], expected)
assert "transformers" not in sys.modules
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_its_exported_program_gives_the_same_elsewhere(script: ModuleType, tmp_path: Path) -> None:
    model = script.Model()
    losses = script.train(model, script.load_ids(), steps=40, batch_size=4)
    assert losses[-1] < losses[0] - 1
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    script.export(model, tmp_path / "program.pt2")
    texts = [torch.randint(256, (1, length)) for length in (1, 7, script.CONTEXT)]
    torch.save([(ids, model(ids)[0]) for ids in texts], tmp_path / "expected.pt")
    paths = [str(tmp_path / name) for name in ("program.pt2", "expected.pt")]
    subprocess.run([sys.executable, "-c", RELOAD, *paths], check=True)
    assert script.write(torch.export.load(paths[0]).module(), "The ", 5).startswith("The ")


def test_experts_are_used_alike(script: ModuleType) -> None:
    model = script.Model()
    script.train(model, script.load_ids(), steps=40, batch_size=4)
    with torch.no_grad():
        _, balance = model(script.load_ids()[: script.CONTEXT][None])
    # TOP_K a layer when even, EXPERTS when one takes all; 1.6 times TOP_K without the loss that balances
    assert balance < 1.25 * script.LAYERS * script.TOP_K


def test_it_is_written_without_transformers() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import own_model; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(SCRIPT.parent)], check=True)
