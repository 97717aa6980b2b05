"""`moetor generate`: text on stdout, facts on stderr, every mistake one line."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")


def test_text_is_on_stdout_and_backends_that_ran_on_stderr(moetor, checkpoint):
    result = moetor("generate", checkpoint, "Return", "--max-new-tokens", "7", "--experts-implementation", "batched_mm")
    assert result.exit_code == 0
    assert len(result.stdout.strip()) > 0
    assert "tokens" not in result.stdout
    # two layers, seven forwards
    assert "experts: batched_mm (14 calls)" in result.stderr
    assert "6 tokens read" in result.stderr
    assert "7 written" in result.stderr


def test_policy_is_reported_as_what_it_chose(moetor, checkpoint):
    result = moetor("generate", checkpoint, "Return", "--max-new-tokens", "2", "--device", "cpu")
    assert "experts: fused (4 calls)" in result.stderr


def test_sub_config_is_chosen_by_key(moetor, checkpoint):
    result = moetor("generate", checkpoint, "Return", "--max-new-tokens", "2", "--experts-implementation", "=eager")
    assert "experts: eager (4 calls)" in result.stderr


def test_sampled_text_depends_on_the_seed_alone(moetor, checkpoint):
    def text(seed: int) -> str:
        arguments = ("--max-new-tokens", "24", "--temperature", "1.5", "--seed", str(seed))
        return moetor("generate", checkpoint, "Return", *arguments).stdout

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_dtype_is_the_one_asked_for(moetor, checkpoint):
    result = moetor("generate", checkpoint, "Return", "--max-new-tokens", "2", "--dtype", "bfloat16")
    assert "in bfloat16" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts-implementation", "gruped_mm"], "unknown experts backend 'gruped_mm'; did you mean 'grouped_mm'"),
        (["--experts-implementation", "txt_config=eager"], "unknown sub-config 'txt_config'"),
        (
            ["--experts-implementation", "eager", "--experts-implementation", "=eager"],
            "must all be KEY=NAME, got 'eager'",
        ),
        (["--dtype", "int4"], "--dtype must be one of auto, float32, bfloat16, float16, float64, got 'int4'"),
        (["--device", "nowhere"], "--device needs a device of this machine, got 'nowhere'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_option_is_one_line_and_exit_code_2(moetor, checkpoint, one_line, arguments, message):
    result = moetor("generate", checkpoint, "Return", *arguments)
    assert result.exit_code == 2
    assert message in one_line(result.stderr)
    assert not result.stdout


def test_missing_folder_is_one_line(moetor, one_line, tmp_path):
    result = moetor("generate", tmp_path / "nothing", "Return")
    assert result.exit_code == 2
    assert "there is no folder" in one_line(result.stderr)


def test_folder_without_a_model_is_one_line(moetor, one_line, tmp_path):
    result = moetor("generate", tmp_path, "Return")
    assert result.exit_code == 1
    one_line(result.stderr)


def test_hub_id_without_a_network_is_one_line(moetor, one_line):
    result = moetor("generate", "nobody/has-this-model", "Return")
    assert result.exit_code == 1
    one_line(result.stderr)


def test_truncated_checkpoint_is_one_line(moetor, checkpoint, one_line, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "truncated"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    result = moetor("generate", folder, "Return")
    assert result.exit_code == 1
    assert "cannot be read" in one_line(result.stderr)


def test_empty_prompt_is_one_line(moetor, checkpoint, one_line):
    result = moetor("generate", checkpoint, "")
    assert result.exit_code == 2
    assert "no tokens" in one_line(result.stderr)
