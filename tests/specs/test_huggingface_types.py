"""Every type of transformers' causal language models, against the parameters that its own modules have.

tests/published/huggingface_types.json is written by tools/hf_counts.py: the default configuration of each type, and
changes of it one at a time, each with the parameters of the module that transformers builds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cost.parameters import num_active_params, num_params
from planner.errors import InputError
from planner.specs.huggingface import read_config
from planner.specs.huggingface_types import MISSING, TYPES
from planner.specs.model import ModelSpec
from planner.specs.validate import validate

RECORDED = json.loads((Path(__file__).parents[1] / "published" / "huggingface_types.json").read_text())["causal"]
BUILT = {name: each for name, each in RECORDED.items() if "config" in each}
TEXT_ALONE = {"emu3", "fuyu", "gemma3", "got_ocr2", "moss_transcribe_diarize"}
"""Of these the library counts a tower of images or audio that our document does not have, which the reader is told."""
UNUSED_EXPERTS = {"longcat_flash"}
"""The library holds matrices for experts that pass a token on, which no checkpoint has and nothing reads."""
READ = sorted(
    name
    for name in set(BUILT) - TEXT_ALONE - UNUSED_EXPERTS
    if BUILT[name]["config"]["model_type"] in TYPES or "text_config" in BUILT[name]["config"]
)
FLAGS = {"attention_bias", "mlp_bias", "is_moe", "enable_bias", "use_bias"}
"""Keys that some types refuse when they are set."""


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return config | {
        key: merged(config[key], value) if isinstance(value, dict) and isinstance(config.get(key), dict) else value
        for key, value in change.items()
    }


def flat(change: dict[str, Any]) -> set[str]:
    inside = [flat(value) if isinstance(value, dict) else {key} for key, value in change.items()]
    return set().union(*inside)


def counts(tmp_path: Path, config: dict[str, Any]) -> tuple[int, int]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    model = validate(ModelSpec, read_config(path, "config.json").tree)
    return num_params(model), num_active_params(model)


def test_most_types_are_read_and_the_others_say_which_block_they_lack(tmp_path: Path) -> None:
    assert len(READ) >= 150
    for name in set(MISSING) & set(BUILT):
        with pytest.raises(InputError, match="is not supported: it has"):
            counts(tmp_path, BUILT[name]["config"])
    assert not set(MISSING) & set(TYPES)


@pytest.mark.parametrize("name", READ)
def test_default_configurations_have_the_parameters_of_the_modules(name: str, tmp_path: Path) -> None:
    first = BUILT[name]["cases"][0]
    assert counts(tmp_path, BUILT[name]["config"]) == (first["num_params"], first["num_active_params"])


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_changed_configurations_have_the_parameters_of_the_modules(name: str, tmp_path: Path) -> None:
    for case in BUILT[name]["cases"][1:]:
        wanted = case["num_params"], case["num_active_params"]
        try:
            found = counts(tmp_path, merged(BUILT[name]["config"], case["change"]))
        except InputError:
            assert flat(case["change"]) <= FLAGS  # refused, and never counted wrong
            continue
        assert found == wanted, case["change"]


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_key_at_its_default_may_be_missing(name: str, tmp_path: Path) -> None:
    """Or it is refused: what is left out never changes a count."""
    config, first = BUILT[name]["config"], BUILT[name]["cases"][0]
    aside = {"model_type", "architectures", "text_config", *({"num_key_value_heads"} if name == "nemotron" else ())}
    for key in sorted(set(config) - aside):  # nemotron's class has no default that it can build
        try:
            found = counts(tmp_path, {other: value for other, value in config.items() if other != key})
        except InputError:  # it must be there
            continue
        assert found == (first["num_params"], first["num_active_params"]), key
