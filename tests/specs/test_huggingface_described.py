"""Types that no table reads, described from the modules of the transformers library on the meta device.

The oracle of counts is tests/published/huggingface_types.json. The oracle of shapes is the table, for types that both
read: it was written from the code of the types, and the description only sees parameters.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planner import describe
from planner.cli import main as run
from planner.cost.parameters import num_active_params, num_params
from planner.errors import EnvironmentProblem, InputError
from planner.specs.by_name import load_model
from planner.specs.huggingface import config_from_text
from planner.specs.huggingface.config import NotInTable
from planner.specs.model import ModelSpec
from planner.specs.validate import validate

pytest.importorskip("transformers", reason="transformers is not installed, which `planner models --from` asks for")
from planner.trainer.describe import described, main

RECORDED = json.loads((Path(__file__).parents[1] / "published" / "huggingface_types.json").read_text())
BUILT = {
    (part, name): each for part in ("causal", "image_text") for name, each in RECORDED[part].items() if "config" in each
}
NOT_EXPRESSIBLE = {
    ("causal", "blt"),  # several models, each with a configuration of its own
    ("image_text", "pi0"),
    ("image_text", "unlimited_ocr"),
    ("image_text", "blip"),  # its decoder has a head that is no matrix of the module's own
    ("image_text", "dots3_note"),  # a tower with experts
    ("image_text", "nemotron_h_omni"),  # the library does not say where the head is; the table reads this type
    ("image_text", "pp_formulanet"),  # no table of embeddings where the library's interface asks for it
    # patches that no square of pixels makes
    *(("image_text", name) for name in ("florence2", "inkling_mm_model", "kosmos-2.5", "pix2struct")),
}
"""Types of which the description says that our document cannot hold them."""
FAST = (
    *(("causal", name) for name in ("gpt_neo", "doge", "xlm-roberta-xl", "zamba", "openai-gpt", "jetmoe", "kolibri1")),
    *(("image_text", name) for name in ("ovis2", "janus", "qwen2_5_omni_thinker")),
)


def model_of(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate_json(json.dumps(described(config)["document"]))


def is_in_table(config: dict[str, Any]) -> bool:
    try:
        config_from_text(json.dumps(config), "config.json")
    except NotInTable:
        return False
    return True


@pytest.mark.parametrize("key", FAST, ids=" ".join)
def test_a_described_type_has_the_parameters_of_its_module(key: tuple[str, str]) -> None:
    assert not is_in_table(BUILT[key]["config"])
    model = model_of(BUILT[key]["config"])
    assert num_params(model) == BUILT[key]["cases"][0]["num_params"]
    assert ModelSpec.model_validate_json(json.dumps(model.written())) == model


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(BUILT.keys() - NOT_EXPRESSIBLE), ids=" ".join)
def test_every_type_has_the_parameters_of_its_module(key: tuple[str, str]) -> None:
    assert num_params(model_of(BUILT[key]["config"])) == BUILT[key]["cases"][0]["num_params"]


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(NOT_EXPRESSIBLE), ids=" ".join)
def test_what_a_document_cannot_hold_is_refused(key: tuple[str, str]) -> None:
    with pytest.raises((InputError, ValueError)):
        model_of(BUILT[key]["config"])


def blocks(model: ModelSpec) -> set[tuple[Any, ...]]:
    """Attention and feed-forward block of each kind of layers, without windows."""
    return {
        (each.attends and (each.num_heads, each.num_kv_heads, each.head_size, each.mla), each.ffn_hidden_size)
        for _, each in model.kinds()
        if not each.moe
    }


@pytest.mark.parametrize(
    "name", ["llama", "falcon", "gpt_neox", "phi3", "stablelm", "qwen3", "minicpm3", "opt", "gpt2"]
)
def test_the_blocks_are_those_that_the_table_reads(name: str) -> None:
    config = BUILT["causal", name]["config"]
    read = validate(ModelSpec, config_from_text(json.dumps(config), "config.json").tree)
    assert blocks(model_of(config)) == blocks(read)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe", "qwen2_moe"])
def test_the_experts_are_those_that_the_table_reads(name: str) -> None:
    config = BUILT["causal", name]["config"]
    read, seen = validate(ModelSpec, config_from_text(json.dumps(config), "config.json").tree), model_of(config)
    assert num_active_params(seen) == num_active_params(read)
    assert seen.moe is not None
    assert read.moe is not None
    for field in ("num_experts", "experts_per_token", "ffn_hidden_size", "shared_ffn_hidden_size"):
        assert getattr(seen.moe, field) == getattr(read.moe, field)


def test_what_is_no_product_of_tokens_is_listed() -> None:
    notes = " ".join(described(BUILT["causal", "doge"]["config"])["notes"])
    assert "without what happens between tokens: self_attn.dt_proj.weight" in notes


def test_layers_with_windows_are_local() -> None:
    model = model_of(BUILT["causal", "kolibri1"]["config"])
    names = BUILT["causal", "kolibri1"]["config"]["layer_types"]
    local = sum(number for number, each in model.kinds() if each.sliding_window and each.global_every == 0)
    assert local == names.count("sliding_attention") > 0


@pytest.fixture
def doge(tmp_path: Path) -> Path:
    (tmp_path / "doge").mkdir()
    path = tmp_path / "doge" / "config.json"
    path.write_text(json.dumps(BUILT["causal", "doge"]["config"]))
    return path


def test_plan_names_the_command_and_the_command_writes_a_document_that_plan_reads(
    doge: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(doge), "dgx-a100", "--gpus", "8", "--global-batch", "8"]) == 2
    assert "planner models --from" in capsys.readouterr().err
    written = doge.parent / "own.yaml"
    assert run(["models", "--from", str(doge), "-o", str(written)]) == 0
    assert "priced as products with every token" in " ".join(capsys.readouterr().err.split())
    model = load_model(str(written))
    assert model.name == "doge"
    assert num_params(model) == BUILT["causal", "doge"]["cases"][0]["num_params"]


def test_code_of_a_checkpoint_is_never_run(doge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (doge.parent / "modeling_x.py").write_text("raise SystemExit('was run')")
    doge.write_text(json.dumps({"model_type": "x", "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}))
    assert main([str(doge)]) == 2
    said = json.loads(capsys.readouterr().out)
    assert "has no model_type `x`" in said["error"]
    assert "never run" in said["hint"]


OPT_350M = {
    "model_type": "opt", "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "ffn_dim": 4096,
    "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 512, "do_layer_norm_before": False,
}  # fmt: skip


def test_a_variant_that_no_row_reads_is_described() -> None:
    """OPT-350m projects its embeddings; its checkpoint has 331,196,416 parameters."""
    assert not is_in_table(OPT_350M)
    model = model_of(OPT_350M)
    assert num_params(model) == 331_196_416
    assert (model.embedding_size, model.num_heads, model.ffn_hidden_size) == (512, 16, 4096)


def test_without_the_library_it_says_what_to_install(doge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.own_program.importlib.util.find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem, match=r"not installed: torch, transformers(\n|.)*pip install"):
        describe.described(doge)


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ('{"error": "of its own", "hint": ""}', "of its own"),
        ('{"document": {}, "num_params": 1, "notes": []}', "a model document cannot hold this model"),
        ("", "cannot be described: it broke"),
    ],
)
def test_what_the_program_says_reaches_the_user(
    doge: Path, monkeypatch: pytest.MonkeyPatch, printed: str, words: str
) -> None:
    answer = subprocess.CompletedProcess((), 2, stdout=printed, stderr="it broke\n")
    monkeypatch.setattr("planner.own_program.subprocess.run", lambda *_, **__: answer)
    with pytest.raises(InputError, match=words):
        describe.described(doge)


def test_a_document_with_another_number_of_parameters_is_refused(doge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(BUILT["causal", "doge"]["config"])
    answer = subprocess.CompletedProcess((), 0, stdout=json.dumps(found | {"num_params": found["num_params"] + 1}))
    monkeypatch.setattr("planner.own_program.subprocess.run", lambda *_, **__: answer)
    with pytest.raises(InputError, match=r"it would have .* parameters, and the module has"):
        describe.described(doge)


def test_a_broken_file_is_a_mistake_of_the_user(doge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doge.write_text(json.dumps(BUILT["causal", "doge"]["config"] | {"hidden_size": "wide"}))
    assert main([str(doge)]) == 2
    assert "transformers builds no module of this file" in json.loads(capsys.readouterr().out)["error"]
