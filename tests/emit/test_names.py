"""Documents of names beside the tables of the programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planner.emit
from planner.emit.names import names_beside
from planner.specs.yaml import read_yaml

EVERY = sorted(Path(planner.emit.__file__).parent.rglob("*.yaml"))
DOCUMENTS = [path for path in EVERY if path.name != "recipes.yaml"]  # a tool writes these, with anchors


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_quick_loader_finds_what_the_strict_reader_finds(path):
    # the strict reader refuses a key that stands twice, and reads `no` and `on` as texts
    assert path.with_suffix(".py").is_file()
    quick, strict = names_beside(str(path.with_suffix(".py"))), read_yaml(path).plain
    assert json.dumps(quick) == json.dumps(strict)  # tuples and lists alike
