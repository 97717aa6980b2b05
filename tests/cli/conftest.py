"""A Qwen3-MoE of a few kilobytes with a byte-level tokenizer, and a way to run commands without a process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Command = Callable[..., Any]


@pytest.fixture
def moetor(monkeypatch: pytest.MonkeyPatch) -> Command:
    """moetor("doctor", "--json") -> typer's result, with exit_code, stdout and stderr; a bug's exception is raised."""
    from typer.testing import CliRunner

    from moetor.cli import app

    monkeypatch.setenv("COLUMNS", "200")  # so that no message is wrapped

    def command(*arguments: str | Path) -> Any:
        return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)

    return command


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, large enough for the experts to decide which token comes next."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = Qwen3MoeConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def one_line() -> Callable[[str], str]:
    """The single line that an error may be; progress bars of others aside."""

    def line(stderr: str) -> str:
        lines = [line for line in stderr.splitlines() if line.startswith("error:")]
        assert "Traceback" not in stderr
        assert len(lines) == 1, stderr
        return lines[0]

    return line


@pytest.fixture
def python() -> Callable[[str], str]:
    """Run code in a process of its own; its stdout."""
    import subprocess

    def run(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    return run
