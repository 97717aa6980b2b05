"""The tree reads downward: no module imports one that stands above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moetor

ROOT = Path(moetor.__file__).parent
# From the bottom; a name may import itself and those in earlier rows.
ROWS = [
    {"core", "kernels"},
    {"debug", "quantization"},
    {"backends"},
    {"forward"},
    {"distributed", "integrations", "nn", "testing"},
    {"bench"},
    {"cli"},
]
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__main__.py" and path.parent != ROOT)
FILES += [ROOT / "forward.py", ROOT / "debug.py"]


def imported_parts(path: Path) -> set[str]:
    """First part of every module of ours that the file imports, at any depth of its code."""
    package = ("moetor", *path.relative_to(ROOT).with_suffix("").parts)
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: -node.level] if node.level else ()
            names = [(*base, *(node.module or "").split("."))]
            if not node.module or names == [("moetor",)]:
                names = [(*base, *(("moetor",) if not node.level else ()), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        parts |= {
            [p for p in name if p][1] for name in names if name[0] == "moetor" and len([p for p in name if p]) > 1
        }
    return parts & set(RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").parts[0]
    above = {part for part in imported_parts(path) if RANK[part] > RANK[own]}
    beside = {part for part in imported_parts(path) if RANK[part] == RANK[own] and part != own}
    allowed_beside = {"core"} if own == "kernels" else set()
    assert not above
    assert beside <= allowed_beside


def test_core_and_kernels_import_torch_and_nothing_else() -> None:
    for path in [*(ROOT / "core").glob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            foreign = (
                {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"torch", "moetor", "triton"}
            )
            assert not foreign, path


def test_importing_moetor_loads_neither_triton_nor_transformers() -> None:
    # torch itself may import triton where it is installed
    code = (
        "import sys, torch; before = set(sys.modules); import moetor; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "new &= {'transformers', 'triton', 'safetensors'}; sys.exit(str(new) if new else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_sorted_and_exist() -> None:
    assert moetor.__all__ == sorted(moetor.__all__)
    for name in moetor.__all__:
        assert getattr(moetor, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        moetor.nonsense  # noqa: B018
