"""JSON Schemas of what the commands print with --json; the documents that people write have theirs in `specs.schema`.

Documents without a type in Python are in `documents.yaml`. `python -m planner.show.schema FOLDER` writes the schemas.
"""

from __future__ import annotations

import json
import re
import sys
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic reads typing's own only from Python 3.12 on

from planner.answers.difference import Difference
from planner.answers.report import whole_sections
from planner.cost.goodput import Checkpoint, Goodput
from planner.cost.ledger import MemoryLine, Verdict
from planner.cost.run import WholeRun
from planner.evidence.check import Check
from planner.evidence.compare.groups import Group
from planner.evidence.compare.report import Outcomes
from planner.evidence.compare.sweeps import Sweep
from planner.layout import Assumed, Layout
from planner.plan import PLAN_KEYS, Plan
from planner.specs.cluster import AnyCluster, ClusterSpec, MixedClusterSpec
from planner.specs.engine import EngineSpec
from planner.specs.model import ModelSpec
from planner.specs.schema import DIALECT
from planner.specs.training import TrainingSpec
from planner.specs.yaml import shipped_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

_PARTS: Final = (
    *(int, float, str, bool, Any, Assumed, Check, Checkpoint, Difference, EngineSpec, Goodput, Group, Layout),
    *(MemoryLine, ModelSpec, Outcomes, whole_sections(), Sweep, TrainingSpec, WholeRun),
)
"""Types in Python that answers are, or have as parts."""


def _type(words: str, known: Mapping[str, Any]) -> Any:
    """The type that is written as in Python: a name, or `list[...]`, or several with ` | ` between them."""
    each = re.split(r" \| (?![^[]*])", words)
    if len(each) > 1:
        return reduce(or_, (_type(one, known) for one in each))
    return list[_type(words[5:-1], known)] if words.startswith("list[") else known[words]  # type: ignore[misc]


def _documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The type of each answer, and the types of `documents.yaml` and of their parts by name."""
    known: dict[str, Any] = {"None": None, "Verdict": Verdict, "AnyCluster": AnyCluster, "Nodes": int | dict[str, int]}
    known |= {each.__name__: each for each in _PARTS}
    make: Any = TypedDict  # a type checker wants a literal name
    rows = shipped_yaml(Path(__file__).with_name("documents.yaml")).plain
    for name, said in rows["documents"].items():
        about, of = said.pop("about"), said.pop("of", "")
        keys = known[of].__annotations__.copy() if of else {}
        for key, words in said.items():
            kind = _type(words, known)
            keys[key.removesuffix("?")] = NotRequired[kind] if key[-1] == "?" else kind
        known[name] = make(name, keys)
        known[name].__doc__ = about
    return {name: _type(words, known) for name, words in rows["answers"].items()}, known


def answer_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of each answer, by the name of its command."""
    kinds, known = _documents()
    found = {name: _as_written(TypeAdapter(kind).json_schema(mode="serialization")) for name, kind in kinds.items()}
    found["plan"] = _as_written(_plan_schema(known["PlanFigures"], known["Unfit"]))
    for key in ("$defs", "properties"):  # an explanation adds sections to its plan
        found["explanation"][key] |= found["plan"][key]
    found["explanation"]["required"] = found["plan"]["required"]
    for name in ("models", "clusters"):  # a document has its source and its sizes beside its own keys
        for document in (ModelSpec, ClusterSpec, MixedClusterSpec):
            found[name]["$defs"].get(document.__name__, {})["additionalProperties"] = True
    return {name: {"$schema": DIALECT, **schema} for name, schema in found.items()}


def _plan_schema(*more: Any) -> dict[str, Any]:
    """The schema of a plan document: the fields of a plan, figures that follow from them, and what would help."""
    schema, figures, unfit = (TypeAdapter(kind).json_schema(mode="serialization") for kind in (Plan, *more))
    for derived in (figures, unfit):
        schema["$defs"] |= derived["$defs"]
    fields = {**schema["properties"], **figures["properties"]}
    fields["batch_choice"] = fields.pop("batch")
    schema["properties"] = {key: fields[key] for key in (*PLAN_KEYS, "checksum")} | unfit["properties"]
    return {**schema, "required": [*PLAN_KEYS, "checksum"]}


def _as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with the keys that a plan document adds to an object, or leaves out of it."""
    definitions = schema.get("$defs", {})
    for name, key, kind in (("WholeRun", "days", "number"), ("MemoryLine", "stage", "integer")):
        if name in definitions:
            definitions[name]["properties"][key] = {"type": kind}
            definitions[name]["required"].append(key)
    if layout := definitions.get("Layout"):
        layout["required"] = [key for key in layout["properties"] if key not in ("pools", "segment")]
    return schema


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    for name, schema in answer_schemas().items():
        (Path(sys.argv[1]) / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
