"""Errors for a JSON document that is not a plan of this format, with hints on how to make a plan."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any, Final

from planner.errors import InputError
from planner.specs.by_name import load_model, model_names
from planner.specs.cluster_documents import LOCAL_CLUSTER, cluster_names, load_cluster
from planner.specs.job import RISK
from planner.specs.text import printable
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        return of_another_planner(data, name, f"it has format {printable(repr(data['format']), 40)}")
    keys = printable(", ".join(map(str, list(data)[:5])), 80) or "none"
    return InputError(f"{name} is not a plan: its keys are {keys}", hint=HOW_TO_GET_ONE)


def of_another_planner(data: dict[str, Any], name: str, why: str) -> InputError:
    """The error for a plan that this planner does not read, with the command that plans the same job again."""
    message = f"{name} is not a valid plan document of format {PLAN_FORMAT}, which this planner reads: {why}"
    return InputError(message, hint=f"plan again:\n{command_again(data)}")


def command_again(data: dict[str, Any]) -> str:
    """The shell command, on one line, that plans the job of a plan of any format anew; derived from the plan's keys."""
    model, cluster, training, options = (_mapping(data, key) for key in ("model", "cluster", "training", "options"))
    choice, was_searched = _mapping(data, "batch_choice"), bool(data.get("certificate"))
    batch = f"{choice.get('least')}..{choice.get('most')}" if choice else training.get("global_batch_size")
    given: list[tuple[str, Any]] = [
        *_sizes(cluster),
        ("--seq-len", training.get("sequence_length")),
        ("--global-batch", batch),
        ("--precision", training.get("precision")),
        ("--engine", _unless("torch", _mapping(data, "engine").get("name"))),
        ("--objective", _unless("throughput", options.get("objective"))),
        ("--headroom", options.get("headroom")),
        ("--risk", _unless(RISK, options.get("risk")) if options.get("headroom") is None else None),
        *(("--pin", pin) for pin in _list(options, "pins")),
        *(("--forbid", each) for each in _list(options, "forbidden")),
        *(("--set", setting) for setting in _settings(model, cluster, training)),
        ("--layout", None if was_searched else _layout(_mapping(data, "layout"))),
    ]
    lifted = [f"--{key.replace('_', '-')}" for key in ("allow_tp_across_nodes", "allow_offload") if options.get(key)]
    words = ["planner", "plan" if was_searched else "explain", *_names(model, cluster), *lifted]
    words += [str(word) for option, value in given if value is not None for word in (option, value)]
    return printable(shlex.join(words), 8000)


def _mapping(data: dict[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _list(data: dict[str, Any], key: str) -> list[Any]:
    found = data.get(key)
    return found if isinstance(found, list) else []


def _unless(usual: Any, value: Any) -> Any:
    return None if value == usual else value


def _names(model: dict[str, Any], cluster: dict[str, Any]) -> Iterator[str]:
    """Names of shipped models and clusters; for a user's document, the file that probably contained it."""
    for data, shipped, word in ((model, model_names(), "MODEL"), (cluster, cluster_names(), "CLUSTER")):
        name = str(data.get("name", word))
        yield name if name in shipped else f"{name}.yaml"


def _sizes(cluster: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The number of hosts, or the number of devices if a host is used only in part."""
    name, hosts, each = cluster.get("name"), cluster.get("hosts"), cluster.get("devices_per_host")
    pools = [pool for pool in _list(cluster, "pools") if isinstance(pool, dict)]
    if pools:
        yield "--nodes", ",".join(f"{pool.get('name')}={pool.get('hosts')}" for pool in pools)
    elif name in cluster_names() and isinstance(hosts, int) and isinstance(each, int):
        whole = name != LOCAL_CLUSTER and getattr(load_cluster(name), "devices_per_host", each) == each
        yield ("--nodes", hosts) if whole else ("--gpus", hosts * each)


def _settings(model: dict[str, Any], cluster: dict[str, Any], training: dict[str, Any]) -> Iterator[str]:
    """Values of a document that differ from its defaults, or from the shipped document with its name."""
    options = {"sequence_length", "global_batch_size", "precision"}
    usual = TrainingSpec(sequence_length=1, global_batch_size=1).model_dump(mode="json")
    yield from _changes("training", {key: training.get(key) for key in usual if key not in options}, usual)
    if model.get("name") in model_names():
        yield from _changes("model", model, load_model(model["name"]).model_dump(mode="json"))
    if cluster.get("name") in cluster_names():  # other shipped figures may be newer than the plan's
        shipped = load_cluster(cluster["name"]).model_dump(mode="json")
        yield from _changes("cluster", cluster, {"price": shipped.get("price")})


def _changes(root: str, data: dict[str, Any], usual: dict[str, Any]) -> Iterator[str]:
    for key, value in data.items():
        if key in usual and value != usual[key] and isinstance(value, str | int | float):
            yield f"{root}.{key}={value if isinstance(value, str) else json.dumps(value)}"
        elif key in usual and isinstance(value, list) and value != (usual[key] or []):
            yield f"{root}.{key}=[{','.join(map(str, value))}]"


def _layout(layout: dict[str, Any]) -> str:
    texts = {key: "/".join(map(str, value)) if isinstance(value, list) else value for key, value in layout.items()}
    return ",".join(f"{key}={value}" for key, value in texts.items())
