"""Every causal and image-text type of transformers, compared with the parameters of its own modules.

tools/hf_counts.py writes tests/published/huggingface_types.json: the default configuration of each type, and single
changes of it, each with the parameters of the module that transformers builds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from project_tools import load_tool

from planner.cost.parameters import num_active_params, num_params, vision_params
from planner.errors import InputError
from planner.specs.huggingface import config_from_text
from planner.specs.huggingface.config import NotInTable
from planner.specs.model import ModelSpec
from planner.specs.validate import validate

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests" / "published" / "huggingface_types.json").read_text())
BUILT = {
    (part, name): each for part in ("causal", "image_text") for name, each in RECORDED[part].items() if "config" in each
}
"""Records by part of the library's tables and model_type."""


def is_in_table(config: dict[str, Any]) -> bool:
    try:
        config_from_text(json.dumps(config), "config.json")
    except NotInTable:
        return False
    return True


LEFT_OUT = {("causal", "moss_transcribe_diarize")}
"""A tower for sound, which the reader is told that our document has not."""
READ = sorted(key for key, each in BUILT.items() if key not in LEFT_OUT and is_in_table(each["config"]))
MUST = {"causal": 112, "image_text": 35}
"""Numbers of types that the table reads, of 189 and of 97 in transformers 5.23."""
FLAGS = {"attention_bias", "mlp_bias", "is_moe", "enable_bias", "use_bias", "tie_word_embeddings", "text_config"}
"""Keys that some types do not accept."""


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return config | {
        key: merged(config[key], value) if isinstance(value, dict) and isinstance(config.get(key), dict) else value
        for key, value in change.items()
    }


def flat(change: dict[str, Any]) -> set[str]:
    inside = [flat(value) if isinstance(value, dict) else {key} for key, value in change.items()]
    return set().union(*inside)


def model_of(config: dict[str, Any]) -> ModelSpec:
    return validate(ModelSpec, config_from_text(json.dumps(config), "config.json").tree)


def counts(config: dict[str, Any]) -> tuple[int, int]:
    model = model_of(config)
    return num_params(model), num_active_params(model)


def wanted(case: dict[str, Any]) -> tuple[int, int]:
    return case["num_params"], case["num_active_params"]


@pytest.mark.parametrize("part", MUST)
def test_default_configurations_have_the_parameters_of_the_modules(part: str) -> None:
    found = {name: counts(BUILT[part, name]["config"]) for of, name in READ if of == part}
    assert found == {name: wanted(BUILT[part, name]["cases"][0]) for name in found}
    assert len(found) >= MUST[part]


@pytest.mark.parametrize("part", MUST)
def test_the_document_that_is_written_means_the_same_model(part: str) -> None:
    for of, name in READ:
        if of == part:
            model = model_of(BUILT[part, name]["config"])
            assert ModelSpec.model_validate_json(json.dumps(model.written())) == model, name


def test_types_that_the_table_leaves_out_say_which_command_reads_them() -> None:
    for key in sorted(BUILT.keys() - set(READ) - LEFT_OUT):
        with pytest.raises(NotInTable, match=r"`planner models --from config.json -o model.yaml` builds the module"):
            counts(BUILT[key]["config"])


@pytest.mark.parametrize(
    ("kind", "flag"),
    [("smollm3", "attention_bias"), ("smollm3", "mlp_bias"), ("mamba", "use_bias"), ("mamba2", "use_bias")],
)
def test_biases_are_those_of_the_modules(kind: str, flag: str) -> None:
    recorded = BUILT["causal", kind]
    (case,) = (each for each in recorded["cases"] if each["change"] == {flag: True})
    assert counts(recorded["config"] | case["change"]) == wanted(case)


def test_a_tower_is_a_part_of_the_model_and_tokens_of_its_images_a_part_of_the_sequence() -> None:
    """LLaVA's CLIP has 303.5 million parameters (its model card says 0.3 B) and produces 576 tokens for an image."""
    model = model_of(BUILT["image_text", "llava"]["config"])
    assert model.vision is not None
    assert round(num_params(model.vision.encoder) / 1e6, 1) == 303.5
    assert num_params(model) == vision_params(model) + num_params(model.model_copy(update={"vision": None}))
    assert (model.vision.tokens_per_image, model.vision.encoder.max_sequence_length) == (576, 577)


@pytest.mark.slow
@pytest.mark.parametrize("key", READ, ids=" ".join)
def test_changed_configurations_have_the_parameters_of_the_modules(key: tuple[str, str]) -> None:
    for case in BUILT[key]["cases"][1:]:
        try:
            found = counts(merged(BUILT[key]["config"], case["change"]))
        except InputError:
            assert flat(case["change"]) <= FLAGS or "num_attention_heads" in flat(case["change"])  # never counted wrong
            continue
        assert found == wanted(case), case["change"]


@pytest.mark.slow
@pytest.mark.parametrize("key", READ, ids=" ".join)
def test_a_key_at_its_default_may_be_missing(key: tuple[str, str]) -> None:
    """Otherwise the file is refused: a missing key never changes a count silently."""
    config, first = BUILT[key]["config"], BUILT[key]["cases"][0]
    aside = {"model_type", "architectures", "text_config", "vision_config"}
    aside |= {"num_key_value_heads"} if key[1] == "nemotron" else set()  # its class has no default that it can build
    for part in (None, "vision_config"):
        whole = config if part is None else config.get(part)
        of_class = RECORDED["towers"].get(whole.get("model_type"), {}).get("config") if part and whole else whole
        for name in sorted(set(whole or ()) - aside):
            if (of_class or {}).get(name) != whole[name]:  # the outer class says more than that of the tower
                continue
            less = {other: value for other, value in whole.items() if other != name}
            try:
                found = counts(less if part is None else {**config, part: less})
            except InputError:  # it must be there
                continue
            assert found == wanted(first), (part, name)


@pytest.mark.slow
def test_the_record_is_that_of_the_library() -> None:
    """Check the oracle itself for a few types, if transformers of the recorded version is installed."""
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != RECORDED["transformers"]:
        pytest.skip(f"the record is of transformers {RECORDED['transformers']}")
    tool = load_tool("hf_counts")
    for mapping, part, name in (
        (tool.auto.MODEL_FOR_CAUSAL_LM_MAPPING, "causal", "qwen3_next"),
        (tool.auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, "image_text", "qwen2_5_vl"),
    ):
        assert tool.cases(mapping, name) == RECORDED[part][name]


LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064},
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
        "model_type": "clip_vision_model",
    },
}
GEMMA = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "model_type": "gemma3_text",
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
        "model_type": "siglip_vision_model",
    },
}


@pytest.mark.parametrize(("config", "built"), [(LLAVA, 7_063_427_072), (GEMMA, 4_300_079_472)])
def test_files_of_checkpoints_that_leave_most_keys_out(config: dict[str, Any], built: int) -> None:
    """Files shaped like LLaVA 1.5 7B and Gemma 3 4B, with the parameters that transformers 5.23 builds from them."""
    assert counts(config)[0] == built
