"""JSON Schemas of the documents that people write; editors use them to complete and check the keys.

`python -m planner.specs.schema FOLDER` writes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from planner.specs.cluster import AnyCluster, DeviceSpec
from planner.specs.engine import EngineSpec
from planner.specs.model import ARCHITECTURES, ModelSpec
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from planner.specs.document import Document

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_DOCUMENTS: Final[dict[str, type[Document]]] = {
    "model": ModelSpec,
    "device": DeviceSpec,
    "training": TrainingSpec,
    "engine": EngineSpec,
}


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON schema of each kind of document, in the form that users write.

    A file may leave out required fields, because other sources supply them: an architecture implies norm, position and
    biases, a cluster names its device, a pool names a cluster, and the command line adds to the training file.
    """
    found = {name: {"$schema": DIALECT, **each.model_json_schema()} for name, each in _DOCUMENTS.items()}
    implied = set().union(*ARCHITECTURES.values())
    definitions = found["model"]["$defs"]
    model = definitions["ModelSpec"]  # which contains another model: its encoder
    model["required"] = [key for key in model["required"] if key not in implied]
    found["model"] = {"$schema": DIALECT, **model, "$defs": definitions}
    found["training"].pop("required")
    found["cluster"] = {"$schema": DIALECT, **_cluster_schema()}
    return {name: _with_counts(schema) for name, schema in found.items()}


def _with_counts(schema: Any) -> Any:
    """The schema, in which whole numbers may also be written like 128k and 4M."""
    if isinstance(schema, list):
        return [_with_counts(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    count = {"type": ["integer", "string"], "pattern": r"^[0-9]+(\.[0-9]+)?[kKMBGT]$"}
    return {key: _with_counts(value) for key, value in schema.items()} | (
        count if schema.get("type") == "integer" else {}
    )


def _cluster_schema() -> dict[str, Any]:
    """The schema of a uniform cluster, or of a mixed cluster whose pools are written out or named."""
    schema: dict[str, Any] = TypeAdapter(AnyCluster).json_schema()
    definitions = schema["$defs"]
    cluster = definitions["ClusterSpec"]
    by_name = {"type": "string", "description": "name of a file in devices/"}
    cluster["properties"]["device"] = {"anyOf": [by_name, cluster["properties"]["device"]]}
    named = {"type": "string", "description": "a cluster, whose keys the pool takes where it has none of its own"}
    definitions["Pool"] = {
        **cluster,
        "description": "A pool of a mixed cluster: a cluster, written out or named.",
        "properties": {**cluster["properties"], "cluster": named},
        "required": ["name"],
        "title": "Pool",
    }
    definitions["MixedClusterSpec"]["properties"]["pools"]["items"] = {"$ref": "#/$defs/Pool"}
    return schema


def write_schemas(folder: Path) -> None:
    """Write each schema to `folder`/NAME.json; equal documents give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        (folder / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
