"""Files of well-known checkpoints, compared with the parameter counts of transformers and of the model cards.

tests/published/hub_configs.json has one config.json per line; tools/hf_counts.py writes the counts beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from project_tools import load_tool

from planner.cost.parameters import num_active_params, num_params
from planner.specs.by_name import load_model, model_names, model_source
from planner.specs.huggingface import config_from_text
from planner.specs.model import ModelSpec
from planner.specs.validate import validate

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests" / "published" / "hub_configs.json").read_text())
CHECKPOINTS: dict[str, dict[str, Any]] = RECORDED["checkpoints"]
SHIPPED = {
    name: page
    for name in model_names()
    for page in CHECKPOINTS
    if f"https://huggingface.co/{page} (" in model_source(name)
}


def read(page: str) -> ModelSpec:
    return validate(ModelSpec, config_from_text(json.dumps(CHECKPOINTS[page]["config"]), "config.json").tree)


def test_files_of_sixty_checkpoints_have_the_parameters_of_the_modules() -> None:
    found = {page: (num_params(read(page)), num_active_params(read(page))) for page in CHECKPOINTS}
    assert found == {page: (each["num_params"], each["num_active_params"]) for page, each in CHECKPOINTS.items()}
    assert len(found) >= 60


@pytest.mark.parametrize("page", CHECKPOINTS)
def test_the_recorded_count_is_the_size_that_the_card_gives(page: str) -> None:
    """This finds sizes that were mistyped. Names are rounded, and some include towers or MTP layers."""
    assert CHECKPOINTS[page]["num_params"] / 1e9 == pytest.approx(CHECKPOINTS[page]["card"], rel=0.065)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_of_such_a_file_is_what_the_file_says(name: str) -> None:
    assert load_model(name).model_copy(update={"name": "model"}) == read(SHIPPED[name])


@pytest.mark.slow
@pytest.mark.parametrize("page", CHECKPOINTS)
def test_the_recorded_count_is_that_of_the_library(page: str) -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != RECORDED["transformers"]:
        pytest.skip(f"the record is of transformers {RECORDED['transformers']}")
    tool = load_tool("hf_counts")
    recorded = CHECKPOINTS[page]
    assert tool.of_checkpoint(recorded["config"]) == {key: recorded[key] for key in ("num_params", "num_active_params")}
