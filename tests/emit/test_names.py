"""Documents of names beside the tables of the programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest

import planner.emit
from planner.emit.names import names_beside, refusals
from planner.layout import Layout
from planner.search.space.constraints import Constraints
from planner.specs.engine import EngineSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.yaml import read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY = sorted(Path(planner.emit.__file__).parent.rglob("*.yaml"))
DOCUMENTS = [path for path in EVERY if path.name != "recipes.yaml"]  # a tool writes these, with anchors


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_quick_loader_finds_what_the_strict_reader_finds(path):
    # the strict reader refuses a key that stands twice, and reads `no` and `on` as texts
    assert path.with_suffix(".py").is_file()
    quick, strict = names_beside(str(path.with_suffix(".py"))), read_yaml(path).plain
    assert json.dumps(quick) == json.dumps(strict)  # tuples and lists alike


ROWS = {  # section -> the keys that each of its rows has, and those that it may have
    "refuses": ({"only", "why"}, {"pin", "says"}),
    "refused": ({"when", "why", "way"}, {"shows", "says"}),
    "implied": ({"when", "keys"}, set()),
    "decides": ({"keys", "why"}, {"field"}),
}
OF_FILES = {"renamed", "said", "strict", "drops", "defaults", "newer", "older"}
OF_FILES |= {"module", "file", "keeps", "adds", "adds_tokens", "yours", "refuses", "refused"}
SIGNS = {  # sign of a condition -> types of what it compares with
    **dict.fromkeys(("is", "not"), (str, int, float, type(None))),
    **dict.fromkeys((">", "<", "%"), (int, float, str)),
    **dict.fromkeys(("in", "not in", "like", "unlike"), (list,)),
}
DOCUMENTS_OF_A_PLAN = {"layout": Layout, "training": TrainingSpec, "model": ModelSpec, "engine": EngineSpec}


def mappings(document: Any, *trail: str) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every mapping in a document, with the keys that lead to it; an item of a list has `[]` there."""
    if isinstance(document, dict):
        yield trail, document
    pairs = document.items() if isinstance(document, dict) else [("[]", each) for each in document]
    for key, inner in pairs:
        if isinstance(inner, dict | list):
            yield from mappings(inner, *trail, str(key))


def section_of(trail: tuple[str, ...]) -> str:
    """The section of a row; empty for a mapping that is none."""
    name = next((each for key in reversed(trail) if (each := key.partition("_")[0]) in ROWS), "")  # as refuses_of
    is_row = "." in trail[-1] if name == "refuses" else trail[-1:] == ("[]",)
    return name if is_row else ""


def is_field(path: str, kind: Any = None) -> bool:
    """Whether a path names a field, by the types of the documents that a plan has."""
    name, _, rest = path.partition(".")
    if kind is None:
        return name in DOCUMENTS_OF_A_PLAN and (not rest or is_field(rest, DOCUMENTS_OF_A_PLAN[name]))
    fields = getattr(kind, "model_fields", {}) | getattr(kind, "__dataclass_fields__", {})
    if rest or name not in fields:
        return name in fields and any(is_field(rest, each) for each in get_args(fields[name].annotation))
    return True


EVERY_ROW = [
    pytest.param(section, trail, row, id=f"{path.stem}-{'-'.join(trail)}-{number}")
    for path in DOCUMENTS
    if path.name not in ("files.yaml", "methods.yaml")  # whose rows are of other kinds
    for number, (trail, row) in enumerate(mappings(names_beside(str(path))))
    if (section := section_of(trail))
]


@pytest.mark.parametrize(("section", "trail", "row"), EVERY_ROW)
def test_a_row_has_known_keys_signs_and_fields(section: str, trail: tuple[str, ...], row: dict[str, Any]) -> None:
    needed, further = ROWS[section]
    assert needed <= {*row} <= needed | further
    paths, document = [*row.get("when", ()), *row.get("shows", ())], trail[-1].partition(".")[0]
    ways = [str(row.get("way", row.get("pin", "")))]
    for sign, value in row.get("when", {}).values():
        assert isinstance(value, SIGNS[sign])
        paths += [value] if sign in (">", "<", "%") and isinstance(value, str) else []
    if section == "refuses":
        paths += [trail[-1], *(f"{document}.{each}" for line in row.get("says", ()) for each in line.split())]
        other: Any = SimpleNamespace()  # a value that no program has
        for name in reversed(trail[-1].split(".")):
            other = SimpleNamespace(**{name: other})
        ways = [fault[1] for each in refusals({trail[-1]: row}) if (fault := each.fault(other))]
        assert ways
    paths += [row["field"]] if "field" in row else []
    paths += [path for way in ways for path in re.findall(r"--set ([\w.]+)=", way)]
    assert [path for path in paths if not is_field(path)] == []
    Constraints.parse([pin for way in ways for pin in re.findall(r"--pin ([^\s,]+)", way)])


def test_every_kind_of_row_is_found() -> None:
    assert {each.values[0] for each in EVERY_ROW} == {*ROWS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_names_of_a_program_s_file_have_known_sections(path):
    for trail, found in mappings(names_beside(str(path))):
        assert not trail or "renamed" not in found or {*found} <= OF_FILES, trail
