"""Errors for a JSON document that is not a plan of this format, with hints on how to make a plan."""

from __future__ import annotations

import shlex
from typing import Any, Final

from planner.errors import InputError
from planner.specs.text import printable

PLAN_FORMAT: Final = 3
HOW_TO_GET_ONE: Final = (
    "write one with `planner plan MODEL CLUSTER ... -o plan.json`; a layout of your own is explained with "
    "`planner explain MODEL CLUSTER --layout tp=8,...`"
)
_OTHER_DOCUMENTS: Final = {
    "traceEvents": "a timeline, as `planner explain --trace` writes it; give the plan that it was made from",
    "front": "a comparison of cluster sizes; `planner plan ... --nodes N -o plan.json` plans one of them",
    "model_type": "a Hugging Face configuration; give it as MODEL, with CLUSTER and --layout",
    "architectures": "a Hugging Face configuration; give it as MODEL, with CLUSTER and --layout",
    "groups": "a report of `planner accuracy`",
    "before": "a comparison that `planner diff --json` printed; give one of the two plans",
    "total_seconds": "statistics of a search; give the plan that `-o` wrote beside them",
    "$schema": "a JSON schema",
}
"""Keys that identify other kinds of JSON documents, and the text for each kind."""


def no_plan(data: Any, name: str) -> InputError:
    """The error for a JSON document that is not a plan of this format; its keys tell the kind of document."""
    if not isinstance(data, dict):
        return InputError(f"{name} is not a plan: a JSON {type(data).__name__}", hint=HOW_TO_GET_ONE)
    known = next((words for key, words in _OTHER_DOCUMENTS.items() if key in data), None)
    if known is not None:
        what, _, way_out = known.partition("; ")
        return InputError(f"{name} is not a plan: it is {what}", hint=way_out or HOW_TO_GET_ONE)
    if "format" in data and data["format"] != PLAN_FORMAT:
        return of_another_planner(name, f"it has format {printable(repr(data['format']), 40)}")
    keys = printable(", ".join(map(str, list(data)[:5])), 80) or "none"
    return InputError(f"{name} is not a plan: its keys are {keys}", hint=HOW_TO_GET_ONE)


def of_another_planner(name: str, why: str) -> InputError:
    """The error for a plan that this planner does not read, with the command that plans the same job again."""
    message = f"{name} is not a valid plan document of format {PLAN_FORMAT}, which this planner reads: {why}"
    return InputError(message, hint=f"plan its job again:\nplanner plan --from {shlex.quote(name)}")
