"""The text and the tokenizer of the tiny model: documentation of this Python's standard library, byte by byte."""

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# a byte that no docstring holds ends a document in the training text; the model sees it as the token END
END_BYTE = 0
END = "<|endoftext|>"
END_ID = 256
HELDOUT_BLOCKS, HELDOUT_BLOCK_BYTES, HELDOUT_SEED = 15, 4000, 0
# a repeated line like "Raises:" is language, a repeated paragraph is leakage into the held-out text
MIN_REPEATED_BYTES = 40
FOREIGN_FOLDERS = {"site-packages", "dist-packages"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files(root: Path, *, tests: bool) -> Iterator[Path]:
    """The library's own .py files, or those of its tests, in sorted order."""
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts)
        if not folders & FOREIGN_FOLDERS and bool(folders & TEST_FOLDERS) == tests:
            yield path


def docstrings(path: Path) -> str:
    """All docstrings of a file, in the order of its lines. The file is parsed, never imported."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # lib2to3 and the tests keep broken files as data
        return ""
    holders = [node for node in ast.walk(tree) if isinstance(node, HOLDERS)]
    holders.sort(key=lambda node: getattr(node, "lineno", 0))  # a class, then its methods, then the next class
    return "\n\n".join(text for text in map(ast.get_docstring, holders) if text)


def comments(path: Path) -> str:
    """Comments of two lines and more, without their marks; a paragraph each."""
    blocks: list[list[str]] = [[]]
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        words = line.strip()
        if words.startswith("#") and not words.startswith("#!"):
            blocks[-1].append(words.lstrip("#").removeprefix(" "))
        elif blocks[-1]:
            blocks.append([])
    return "\n\n".join("\n".join(block) for block in blocks if len(block) > 1)


def documentation(root: Path) -> Iterator[str]:
    """The docstrings of each file of the library, one document a file, then each help topic of `pydoc`."""
    yield from map(docstrings, files(root, tests=False))
    for statement in ast.parse((root / "pydoc_data" / "topics.py").read_bytes()).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Dict):
            yield from ast.literal_eval(statement.value).values()


def more_text(root: Path) -> Iterator[str]:
    """For training alone: comments of the library, docstrings and comments of its tests."""
    yield from map(comments, files(root, tests=False))
    for path in files(root, tests=True):
        yield docstrings(path)
        yield comments(path)


def without_repeats(texts: Iterator[str], seen: set[str]) -> Iterator[bytes]:
    """Each document without the paragraphs that an earlier one (or it itself) already had, as told by `seen`."""
    for text in texts:
        kept = []
        for paragraph in text.replace(chr(END_BYTE), "").split("\n\n"):
            key = " ".join(paragraph.split())
            if key in seen:
                continue
            if len(key) >= MIN_REPEATED_BYTES:
                seen.add(key)
            kept.append(paragraph)
        if document := "\n\n".join(kept).strip():
            yield document.encode()


def load_text() -> tuple[bytes, bytes]:
    """The training text and 60 kB of held-out text, from the standard library of the running interpreter.

    Held out are 15 blocks of 4000 bytes, one at a seeded place in each fifteenth of the documentation. No
    paragraph of 40 bytes or more is in both parts, except the two that each block's edges cut in half.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    end = bytes([END_BYTE])
    text = end.join(without_repeats(documentation(root), seen)) + end
    share = len(text) // HELDOUT_BLOCKS
    places = random.Random(HELDOUT_SEED)
    starts = [share * i + places.randrange(share - HELDOUT_BLOCK_BYTES) for i in range(HELDOUT_BLOCKS)]
    heldout = b"".join(text[start : start + HELDOUT_BLOCK_BYTES] for start in starts)
    ends = [0, *(start + HELDOUT_BLOCK_BYTES for start in starts)]
    train = end.join(text[a:b] for a, b in zip(ends, [*starts, len(text)], strict=True))
    return train + end.join(without_repeats(more_text(root), seen)) + end, heldout


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: token id = byte value, and 256 is the end of a text.

    >>> build_tokenizer()("é!").input_ids
    [195, 169, 33]
    """
    # byte-level BPE writes bytes as printable characters: the printable ones as themselves, the others from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
