"""Reads plan documents as they were written, and the documents in them; `planner.reading` prices a plan again, too."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from planner.errors import EnvironmentProblem, InputError
from planner.layout import Layout, format_layout
from planner.layout_text import parse_layout
from planner.no_plan import HOW_TO_GET_ONE, PLAN_FORMAT, no_plan, of_another_planner
from planner.plan import Plan, checksum
from planner.plan_parts import SearchOptions
from planner.specs.calibration import CalibrationEntry
from planner.specs.cluster import AnyCluster, ClusterSpec
from planner.specs.engine import EngineSpec
from planner.specs.files import limited_text
from planner.specs.model import ModelSpec
from planner.specs.text import printable
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")
_MOST_DIGITS: Final = 40


def plan_from_json(text: str, *, name: str = "plan") -> Plan:
    """Read a plan document as written; the inverse of `plan_to_json`. `planner.reading` also prices the plan again.

    Raises:
        InputError: not JSON, another format version, a document inside that is not valid, or a plan that was edited.
    """
    plan, is_edited = parse_plan(text, name=name)
    if is_edited:
        raise edited(name)
    return plan


def parse_plan(text: str, *, name: str) -> tuple[Plan, bool]:
    """The plan of a document, and whether it was changed after it was written.

    Raises:
        InputError: not JSON, another format version, or a document inside that is not valid.
    """
    try:
        data = _json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not a plan: not JSON, {printable(str(error))}", hint=HOW_TO_GET_ONE) from None
    if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT or "layout" not in data:
        raise no_plan(data, name)
    try:
        return _plan_from_dict(data), data["checksum"] != checksum(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # and pydantic's own, which is a ValueError
        raise of_another_planner(name, _detail(error)) from None


def edited(name: str, *differences: str) -> InputError:
    """The error for a plan that was changed after it was written."""
    return InputError(
        f"{name} was edited after it was written{''.join(f'; {each}' for each in differences)}",
        hint="make the plan again; `planner explain MODEL CLUSTER --layout tp=8,...` prices a layout of your own",
    )


def _json(text: str) -> Any:
    return json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_float)


def _int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{printable(text, 40)} is no number")
    return number


def layout_from_dict(data: Any) -> Layout:
    """The inverse of `layout_to_dict`; raise ValueError for a layout that the command line could not express."""
    layout = _strict(Layout, data)
    _check_layout(layout)
    return layout


def _check_layout(layout: Layout) -> None:
    """Raise ValueError for a layout that the command line could not express."""
    text = format_layout(layout)
    try:
        read = parse_layout(text, num_layers=sum(layout.layers_per_stage), num_devices=1)
    except InputError as error:
        raise ValueError(f"layout: {error.mistakes[0].message}") from None
    if read != layout:
        raise ValueError(f"layout: {text} is read as {format_layout(read)}")


def _strict(kind: type[T], data: Any) -> T:
    """Validate a document, or a dataclass of numbers and texts; JSON mode reads lists as tuples."""
    of_any: Any = kind
    read: T = _adapter(of_any).validate_json(json.dumps(data), strict=True)
    return read


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _check_pools(cluster: AnyCluster, layout: Layout) -> None:
    """Check that a layout names a pool for each stage on a mixed cluster, and no pools on any other cluster."""
    names = {pool.name for pool in cluster.pools} if len(cluster.pools) > 1 else set()
    if set(layout.pools) - names or len(layout.pools) != (layout.pp if names else 0):
        raise ValueError(f"layout: pools are {'/'.join(layout.pools) or 'missing'}")


def _plan_from_dict(data: dict[str, Any]) -> Plan:
    """The plan of a document; raise KeyError or ValueError where the document says no plan."""
    keys = {"batch": "batch_choice"}
    for document in (ModelSpec, ClusterSpec, TrainingSpec, EngineSpec, CalibrationEntry):
        document.model_rebuild()  # else pydantic builds each of them as a part of the plan, and again by itself
    plan = _strict(Plan, {each.name: data[keys.get(each.name, each.name)] for each in fields(Plan)})
    beside = (plan.minimum, plan.with_runs, plan.own, *plan.runners_up)
    layouts = [plan.layout, *(each.layout for each in beside if each is not None)]
    for layout in layouts:
        _check_layout(layout)
    _check_pools(plan.cluster, plan.layout)
    if len(plan.calibration) != len(plan.cluster.pools):
        raise ValueError("calibration: not one entry for each pool")
    return plan


def plan_from_file(path: Path) -> Plan:
    """Read a plan file as `plan_from_json` does.

    Raises:
        InputError: the file is not a plan.
        EnvironmentProblem: the file cannot be read.
    """
    return plan_from_json(plan_text(path), name=printable(str(path)))


def saved_documents(path: Path, *keys: str) -> list[Any]:
    """Documents (`model`, `cluster`, `training`) of a plan file of any format, and `options`: keywords of `plan_job`.

    A newer planner can so plan an older planner's job again, or continue its run.

    Raises:
        InputError: the file does not hold these documents, as this version reads them.
        EnvironmentProblem: the file cannot be read.
    """
    try:
        data = _json(plan_text(path))
        return [_DOCUMENTS[key](data) for key in keys]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        words = f"{printable(str(path))} is not a plan with a job that this planner reads: {_detail(error)}"
        raise InputError(words, hint="give the job as MODEL CLUSTER and options, or another --output") from None


def _saved_options(data: dict[str, Any]) -> dict[str, Any]:
    """The options with which a plan was searched, and its engine and range of batches, as keywords of `plan_job`."""
    given = {each.name for each in fields(SearchOptions)} & data["options"].keys()
    options = _strict(SearchOptions, {name: data["options"][name] for name in given})
    names = {"pins": "pin", "forbidden": "forbid"}
    said = {names.get(name, name): value for name, value in asdict(options).items() if value is not None}
    said["engine"], batch = _strict(str, data["engine"]["name"]), data["batch_choice"]
    said |= {"global_batch": f"{batch['least']}..{batch['most']}"} if batch else {}
    dropped = {"risk" if "headroom" in said else "", "" if data["certificate"] else "within"}
    return {name: value for name, value in said.items() if name not in dropped}


_ANY_CLUSTER: Any = AnyCluster
_DOCUMENTS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "model": lambda data: _strict(ModelSpec, data["model"]),
    "cluster": lambda data: _strict(_ANY_CLUSTER, data["cluster"]),
    "training": lambda data: _strict(TrainingSpec, data["training"]),
    "options": _saved_options,
}


def _detail(error: Exception) -> str:
    """What is wrong with a document, in words for a message."""
    if isinstance(error, ValidationError):
        first = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        return printable("; ".join(first), 300)
    return printable(f"missing key {error}" if isinstance(error, KeyError) else str(error), 300)


def plan_text(path: Path) -> str:
    """The text of a plan file.

    Raises:
        InputError: the file is too large, or is not text.
        EnvironmentProblem: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return limited_text(file, printable(str(path)))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        hint = HOW_TO_GET_ONE if isinstance(error, FileNotFoundError) else ""
        why = getattr(error, "strerror", None) or error
        raise EnvironmentProblem(f"cannot read {printable(str(path))}: {why}", hint=hint) from None
