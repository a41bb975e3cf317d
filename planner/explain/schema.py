"""The JSON Schema of the sections that `planner explain --json` adds to the plan.

`python -m planner.explain.schema FOLDER` writes the schema.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from planner.explain.report import Sections
from planner.specs.schema import DIALECT


def explanation_schema() -> dict[str, Any]:
    """The schema of the sections; the document also has the keys of the plan."""
    schema = Sections.model_json_schema(mode="serialization")
    return {"$schema": DIALECT, **schema, "additionalProperties": True}


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    text = json.dumps(explanation_schema(), indent=1) + "\n"
    (Path(sys.argv[1]) / "explanation.json").write_text(text, encoding="utf-8")
