"""JSON Schemas of what the commands print with --json; the documents that people write have theirs in `specs.schema`.

`python -m planner.show.schema FOLDER` writes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from planner.answers.difference import Difference
from planner.answers.report import Sections
from planner.evidence.check import Check
from planner.plan import PLAN_KEYS, Plan
from planner.show import documents
from planner.specs.cluster import AnyCluster, ClusterSpec, MixedClusterSpec
from planner.specs.engine import EngineSpec
from planner.specs.model import ModelSpec
from planner.specs.schema import DIALECT

_ANSWERS: Final[dict[str, Any]] = {
    "plan-sizes": documents.Sizes,
    "plan-clusters": documents.Clusters,
    "explanation": Sections,
    "diff": Difference,
    "check": Check,
    "accuracy": documents.Accuracy,
    "verify": documents.Counted,
    "models": list[documents.ModelEntry] | ModelSpec,
    "clusters": list[documents.ClusterEntry | documents.MixedEntry] | AnyCluster,
    "engines": list[documents.EngineEntry] | EngineSpec,
    "glossary": list[documents.Term],
}
"""The type of each answer."""


def answer_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of each answer, by the name of its command."""
    found = {name: _as_written(TypeAdapter(kind).json_schema(mode="serialization")) for name, kind in _ANSWERS.items()}
    found["plan"] = _as_written(_plan_schema())
    for key in ("$defs", "properties"):  # an explanation adds sections to its plan
        found["explanation"][key] |= found["plan"][key]
    found["explanation"]["required"] = found["plan"]["required"]
    for name in ("models", "clusters"):  # a document has its source and its sizes beside its own keys
        for document in (ModelSpec, ClusterSpec, MixedClusterSpec):
            found[name]["$defs"].get(document.__name__, {})["additionalProperties"] = True
    return {name: {"$schema": DIALECT, **schema} for name, schema in found.items()}


def _plan_schema() -> dict[str, Any]:
    """The schema of a plan document: the fields of a plan, figures that follow from them, and what would help."""
    kinds = (Plan, documents.PlanFigures, documents.Unfit)
    schema, figures, unfit = (TypeAdapter(kind).json_schema(mode="serialization") for kind in kinds)
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
