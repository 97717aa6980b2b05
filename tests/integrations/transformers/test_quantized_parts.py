"""Which parts of a quantised checkpoint are what: as its config says, as the user asks, and never by chance."""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import moetor
from moetor import CheckpointError, FineGrainedFP8Config, InvalidInput
from moetor.core.formats import mxfp4
from moetor.integrations.transformers import experts_of
from moetor.integrations.transformers.adapters import is_experts
from moetor.quantization import quantize

from . import quantized_checkpoints as checkpoints
from .models import build, logits, tokens
from .quantized_checkpoints import Written, rewrite

SKIPPED = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def v3(tmp_path_factory) -> Written:
    torch.manual_seed(0)
    return checkpoints.write(tmp_path_factory.mktemp("v3"), checkpoints.deepseek_v3(), FineGrainedFP8Config())


@pytest.fixture(scope="module")
def v4(tmp_path_factory) -> Written:
    torch.manual_seed(0)
    fields = FineGrainedFP8Config(scale_fmt="ue8m0", expert_dtype="fp4")
    return checkpoints.write(tmp_path_factory.mktemp("v4"), checkpoints.deepseek_v4(), fields, "scale")


def load(folder: Path, **keywords):
    return moetor.AutoModelForCausalLM.from_pretrained(folder, **keywords).eval()


def formats(model) -> set[str]:
    return {experts_of(module).format for module in model.modules() if is_experts(module)}


def same(model, other) -> bool:
    with torch.no_grad():
        return torch.equal(logits(model, tokens()), logits(other, tokens()))


def test_deepseek_v4_says_what_its_experts_are_outside_of_its_quantization_config(v4, tmp_path) -> None:
    """As in its config.json: `expert_dtype` beside `quantization_config`, not in it."""
    folder = tmp_path / "v4"
    rewrite(v4.folder, folder, lambda tensors: None)
    said = json.loads((folder / "config.json").read_text())
    said["expert_dtype"] = said["quantization_config"].pop("expert_dtype")
    (folder / "config.json").write_text(json.dumps(said))
    model = load(folder, dtype=torch.float32)
    assert formats(model) == {"mxfp4_dynamic"}
    assert same(model, load(v4.folder, dtype=torch.float32))
    model.save_pretrained(tmp_path / "again")
    assert same(model, load(tmp_path / "again", dtype=torch.float32))


@pytest.mark.parametrize("written", ["v3", "v4"])
def test_in_bfloat16_every_other_parameter_is_of_its_twins_dtype(written, request) -> None:
    """Some models keep a few of them in float32."""
    written = request.getfixturevalue(written)
    model, twin = load(written.folder), load(written.twin, dtype=torch.bfloat16)
    ours, expected = dict(model.named_parameters()), dict(twin.named_parameters())
    assert model.dtype == torch.bfloat16
    for key in ours.keys() & expected.keys():
        if ".experts." not in key:
            assert ours[key].dtype == expected[key].dtype
            assert torch.equal(ours[key], expected[key])
    # payload and scales are nobody's to round
    for one, other in zip(model.modules(), load(written.folder, dtype=torch.float32).modules(), strict=True):
        if is_experts(one):
            for got, wanted in zip(experts_of(one).tensors(), experts_of(other).tensors(), strict=True):
                assert got.dtype == wanted.dtype
                assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("alias", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("library", [moetor, transformers])
def test_a_user_may_have_some_experts_dequantised(v3, tmp_path, alias, library) -> None:
    """They are quantised in the files, so their numbers need their scales."""
    model = load(v3.folder, quantization_config=library.FineGrainedFP8Config(**{alias: [SKIPPED]}))
    got, twin = (experts_of(one.get_submodule(SKIPPED)) for one in (model, load(v3.twin)))
    assert got.format == "dense"
    assert torch.equal(got.up.data, twin.up.data.bfloat16())
    assert torch.equal(got.down.data, twin.down.data.bfloat16())
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert experts_of(again.get_submodule(SKIPPED)).format == "dense"
    assert same(model, again)


def test_a_config_that_calls_quantised_experts_dense_is_wrong(v3, tmp_path) -> None:
    """Else payload would be taken for weights, without its scales: numbers up to 448."""
    folder = rewrite(v3.folder, tmp_path / "wrong", lambda tensors: None, modules_to_not_convert=[SKIPPED])
    with pytest.raises(CheckpointError, match=rf"quantised experts where its config says .*: {SKIPPED}\.0\.down_proj"):
        load(folder)


def test_a_checkpoint_may_call_them_ignored_layers(v3, tmp_path) -> None:
    def dense(tensors: dict) -> None:
        for key in [key for key in tensors if key.startswith(SKIPPED) and key.endswith(".weight")]:
            del tensors[f"{key}_scale_inv"]
            tensors[key] = tensors[key].bfloat16()

    folder = rewrite(v3.folder, tmp_path / "ignored", dense, ignored_layers=[SKIPPED], modules_to_not_convert=None)
    assert experts_of(load(folder).get_submodule(SKIPPED)).format == "dense"


def test_embeddings_in_fp8_are_looked_up_so(v3, tmp_path) -> None:
    """One scale for the table; it is never made 16 bits as a whole."""
    name, table = "model.embed_tokens", load_file(v3.twin / "model.safetensors")["model.embed_tokens.weight"]
    payload, scale = quantize(table, FineGrainedFP8Config(weight_block_size=None).linear_format)

    def put(tensors: dict) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = payload, scale.reshape(1)

    folder = rewrite(v3.folder, tmp_path / "table", put, modules_to_convert=["embed_tokens"])
    model = load(folder, dtype=torch.float32)
    assert model.get_input_embeddings().weight.dtype == torch.float8_e4m3fn
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(model.get_input_embeddings()(ids), payload.float()[ids] * scale)
        model.save_pretrained(tmp_path / "again")
        again = load(tmp_path / "again", dtype=torch.float32)
        assert again.get_input_embeddings().weight.dtype == torch.float8_e4m3fn
        assert same(model, again)


@pytest.mark.parametrize("fp8", [True, False], ids=["quantised", "on the fly"])
def test_keywords_of_the_config_go_to_it(v3, tmp_path, fp8) -> None:
    if fp8:
        model = load(v3.folder, num_experts_per_tok=1)
        assert model.config.num_experts_per_tok == 1
    else:
        build("qwen3_moe").save_pretrained(tmp_path)
        model = load(tmp_path, quantization_config=FineGrainedFP8Config(), output_router_logits=True)
        assert model.config.output_router_logits


def test_without_a_dtype_in_the_config_it_is_that_of_what_is_not_quantised(v3, tmp_path) -> None:
    rewrite(v3.folder, folder := tmp_path / "silent", lambda tensors: None)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in said.items() if k not in ("dtype", "torch_dtype")})
    )
    assert load(folder).dtype == torch.bfloat16
    dense = load(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert {experts_of(m).dtype for m in dense.modules() if is_experts(m)} == {torch.bfloat16}
    assert "bfloat16 on cpu" in str(dense.explain_experts())


def test_files_may_be_many(v3, tmp_path) -> None:
    """A matrix in one, its scale in another."""
    model = load(v3.folder)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    assert same(model, load(tmp_path))


def test_its_own_state_dict_loads_into_it(v3) -> None:
    model, expected = load(v3.folder), load(v3.folder)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        for module in model.modules():
            if is_experts(module):
                module.gate_up_proj_scale_inv.zero_()
    model.load_state_dict(state)
    assert same(model, expected)


def test_a_quantised_model_keeps_its_dtype(v3) -> None:
    """`.to(dtype)` would make other numbers of payload and scales; transformers refuses `.half()` in the same way."""
    model, expected = load(v3.folder), load(v3.folder)
    with pytest.raises(InvalidInput, match=r"holds quantised experts, .* got \.to\(torch.float16\).*dtype="):
        model.to(torch.float16)
    assert model.to("cpu") is model
    assert same(model, expected)


@pytest.mark.parametrize("name", ["fp8", "gpt_oss"])
def test_plain_transformers_reads_what_moetor_saved(name, tmp_path) -> None:
    """On a CPU it makes 16 bits of it: the same names, and the same numbers but for a rounding of their product.

    Partial blocks it does not read right, so there are none here.
    """
    if name == "fp8":
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 4, "num_attention_heads": 4}
        config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=1, num_key_value_heads=2, **sizes)
        written = checkpoints.write(tmp_path, config, FineGrainedFP8Config())
    else:
        written = checkpoints.write_blocks(tmp_path, checkpoints.gpt_oss(), mxfp4())
    try:
        transformers.AutoModelForCausalLM.from_pretrained(written.folder, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this release of transformers does not read such a checkpoint itself")
    model = load(written.folder)
    model.save_pretrained(tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    # blocks that lie in gate or in up make one matrix of both
    assert all(
        experts_of(m).stacked and not isinstance(experts_of(m).up, tuple) for m in model.modules() if is_experts(m)
    )
    ours = load(written.folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    theirs, expected = dict(plain.named_parameters()), dict(ours.named_parameters())
    assert theirs.keys() == expected.keys()
    for key, parameter in theirs.items():
        torch.testing.assert_close(parameter.float(), expected[key].float(), rtol=2**-7, atol=0.0)


def test_a_failed_load_changes_nothing_of_what_was_given(v3, tmp_path) -> None:
    folder = rewrite(v3.folder, tmp_path / "broken", lambda tensors: tensors.pop(f"{SKIPPED}.0.up_proj.weight"))
    config, asked = transformers.AutoConfig.from_pretrained(folder), FineGrainedFP8Config(modules_to_not_convert=["x"])
    before = copy.deepcopy((config.to_dict(), asked))
    with pytest.raises(CheckpointError, match="lacks expert weights"):
        load(folder, config=config, quantization_config=asked)
    assert (config.to_dict(), asked) == before
