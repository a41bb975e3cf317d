"""The one document that everything after the search reads: complete, versioned, byte-for-byte reproducible."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from planner import __version__
from planner.cost.adapters import num_trained_params
from planner.cost.band import Band
from planner.cost.ledger import HostMemory, LineName, MemoryLine, StageMemory, TimeLine
from planner.cost.run import WholeRun, devices_in_use, whole_run
from planner.errors import EnvironmentProblem, InputError
from planner.layout import Layout, format_layout, parse_layout
from planner.specs.calibration import CalibrationEntry
from planner.specs.cluster import AnyCluster, ClusterSpec, MixedClusterSpec
from planner.specs.engine import EngineSpec
from planner.specs.model import ModelSpec
from planner.specs.text import printable
from planner.specs.training import TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = [
    "PLAN_FORMAT",
    "Plan",
    "RunnerUp",
    "layout_to_dict",
    "plan_from_json",
    "plan_to_dict",
    "plan_to_json",
    "read_plan",
    "write_plan",
    "write_text",
]

PLAN_FORMAT: Final = 1
_SECONDS: Final = ("busy_seconds", "hidden_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A layout that lost, the lines in which it loses and saves most, and in what it differs from the plan.

    near_tie: forecasts of two layouts of one job cannot tell the two apart.
    """

    layout: Layout
    step_seconds: float
    peak_bytes: float
    reason: str
    differs: str = ""
    near_tie: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job, the layout chosen for it, and the ledger that says why.

    Seconds are per optimizer step; of measured runs like it 8 of 10 lie between the low and the high one, and `band`
    says on how many runs that rests. `mfu` and `hfu` name their convention in `flops_convention`. On a mixed cluster
    there is a calibration for each pool.
    """

    model: ModelSpec
    cluster: AnyCluster
    training: TrainingSpec
    engine: EngineSpec
    layout: Layout
    fits: bool
    memory: tuple[StageMemory, ...]
    time: tuple[TimeLine, ...]
    step_seconds: float
    low_step_seconds: float | None
    high_step_seconds: float | None
    calibration: CalibrationEntry | tuple[CalibrationEntry, ...]
    tokens_per_second_per_device: float
    mfu: float
    hfu: float
    flops_convention: str
    band: Band | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    idle_reason: str = ""
    batch: dict[str, Any] | None = None  # how the batch size was chosen, where there was a choice
    certificate: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> WholeRun | None:
        """The whole token budget with this plan; None without a budget."""
        return whole_run(
            self.model,
            self.training,
            step_seconds=self.step_seconds,
            in_use=devices_in_use(self.cluster, self.layout),
        )

    def to_json(self) -> str:
        """The plan document as text, as `planner plan --json` prints it."""
        return plan_to_json(self)


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan document as plain data (docs/decisions.md, command-line contract)."""
    return {
        "format": PLAN_FORMAT,
        "planner_version": __version__,
        "model": plan.model.model_dump(mode="json"),
        "cluster": plan.cluster.model_dump(mode="json"),
        "training": plan.training.model_dump(mode="json"),
        "engine": plan.engine.model_dump(mode="json"),
        "layout": layout_to_dict(plan.layout),
        "world_size": plan.layout.world_size,
        "idle_devices": plan.cluster.num_devices - plan.layout.world_size,
        "idle_reason": plan.idle_reason,
        "fits": plan.fits,
        "step_seconds": plan.step_seconds,
        "low_step_seconds": plan.low_step_seconds,
        "high_step_seconds": plan.high_step_seconds,
        "band": None if plan.band is None else asdict(plan.band),
        "calibration": _calibration_to_data(plan.calibration),
        "tokens_per_second_per_device": plan.tokens_per_second_per_device,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "num_trained_params": num_trained_params(plan.model, plan.training),
        "flops_convention": plan.flops_convention,
        "run": _run_to_dict(plan.run),
        "batch_choice": plan.batch,
        "memory": [_stage_memory_to_dict(stage) for stage in plan.memory],
        "time": [asdict(line) for line in plan.time],
        "runners_up": [{**asdict(runner), "layout": layout_to_dict(runner.layout)} for runner in plan.runners_up],
        "certificate": plan.certificate,
        "options": plan.options,
    }


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """The layout as plain data, one key for each field; `pools` of layouts on mixed clusters only."""
    values = {f.name: list(v) if isinstance(v := getattr(layout, f.name), tuple) else v for f in fields(Layout)}
    return {key: value for key, value in values.items() if key != "pools" or value}


def _calibration_to_data(entries: CalibrationEntry | tuple[CalibrationEntry, ...]) -> Any:
    if isinstance(entries, tuple):
        return [each.model_dump(mode="json") for each in entries]
    return entries.model_dump(mode="json")


def _run_to_dict(run: WholeRun | None) -> dict[str, Any] | None:
    return None if run is None else {**asdict(run), "days": run.days}


def _stage_memory_to_dict(stage: StageMemory) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        **_memory_to_dict(stage, stage.stage),
        "host": stage.host and _memory_to_dict(stage.host, stage.stage),
    }


def _memory_to_dict(memory: StageMemory | HostMemory, stage: int) -> dict[str, Any]:
    return {
        "total_bytes": memory.total_bytes,
        "limit_bytes": memory.limit_bytes,
        "lines": [{"stage": stage, **asdict(line)} for line in memory.lines],
    }


def _memory_from_dict(data: dict[str, Any]) -> dict[str, Any]:
    lines = ({k: v for k, v in each.items() if k != "stage"} for each in data["lines"])
    return {
        "limit_bytes": _number(data, "limit_bytes", above=0),
        "lines": tuple(
            MemoryLine(**{**line, "name": LineName(line["name"]), "num_bytes": _number(line, "num_bytes")})
            for line in lines
        ),
    }


def plan_to_json(plan: Plan) -> str:
    """The plan document as text; equal plans give equal bytes."""
    return json.dumps(plan_to_dict(plan), indent=1, sort_keys=False, allow_nan=False, ensure_ascii=True) + "\n"


def plan_from_json(text: str, *, name: str = "plan") -> Plan:
    """Read a plan document; the inverse of `plan_to_json`.

    Raises:
        InputError: not JSON, another format version, or a document inside that is not valid.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not a plan: not JSON, {error}", hint=_HOW_TO_GET_ONE) from None
    if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT or "layout" not in data:
        raise _no_plan(data, name)
    try:
        return _plan_from_dict(data)
    except (AttributeError, KeyError, TypeError, ValueError, ValidationError) as error:
        detail = f"missing key {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise InputError(f"{name} is not a valid plan document: {detail}", hint="make the plan again") from None


_HOW_TO_GET_ONE: Final = (
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
"""A key that tells another JSON document, and what to say of it."""


def _no_plan(data: Any, name: str) -> InputError:
    """What a JSON document is instead of a plan, as far as its keys tell."""
    if not isinstance(data, dict):
        return InputError(f"{name} is not a plan: a JSON {type(data).__name__}", hint=_HOW_TO_GET_ONE)
    known = next((words for key, words in _OTHER_DOCUMENTS.items() if key in data), None)
    if known is not None:
        what, _, way_out = known.partition("; ")
        return InputError(f"{name} is not a plan: it is {what}", hint=way_out or _HOW_TO_GET_ONE)
    if "format" in data and data["format"] != PLAN_FORMAT:
        found = printable(repr(data["format"]), 40)
        return InputError(
            f"{name} has format {found}, this planner reads format {PLAN_FORMAT}",
            hint="make the plan again with this version",
        )
    keys = printable(", ".join(map(str, list(data)[:5])), 80) or "none"
    return InputError(f"{name} is not a plan: its keys are {keys}", hint=_HOW_TO_GET_ONE)


def layout_from_dict(data: dict[str, Any]) -> Layout:
    """The inverse of `layout_to_dict`; a layout that nobody could write on the command line is a ValueError."""
    fields_: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    layout = Layout(**fields_)
    try:
        read = parse_layout(format_layout(layout), num_layers=sum(layout.layers_per_stage), num_devices=1)
    except InputError as error:
        raise ValueError(f"layout: {error.mistakes[0].message}") from None
    if read != layout:
        raise ValueError(f"layout: {format_layout(layout)} has values of a wrong type")
    return layout


def _number(data: dict[str, Any], key: str, *, above: float = -math.inf) -> Any:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
        raise ValueError(f"{key} is {value!r}")
    return value


def _band_from_dict(data: dict[str, Any] | None) -> Band | None:
    if data is None:
        return None
    numbers = {key: _number(data, key) for key in ("low", "high", "num_near")}
    return Band(**numbers, unseen=tuple(map(str, data["unseen"])), axes=str(data["axes"]))


def _strict(document: type[Any], data: Any) -> Any:
    return document.model_validate_json(json.dumps(data))  # JSON mode reads lists as tuples


def _check_pools(cluster: AnyCluster, layout: Layout) -> None:
    """A layout on a mixed cluster names one of its pools for each stage, and another one names none."""
    names = {pool.name for pool in cluster.pools} if isinstance(cluster, MixedClusterSpec) else set()
    if set(layout.pools) - names or len(layout.pools) != (layout.pp if names else 0):
        raise ValueError(f"layout: pools are {'/'.join(layout.pools) or 'missing'}")


def _plan_from_dict(data: dict[str, Any]) -> Plan:
    def strict(document: type[Any], key: str) -> Any:
        return _strict(document, data[key])

    is_mixed, layout = "pools" in data["cluster"], layout_from_dict(data["layout"])
    cluster = strict(MixedClusterSpec if is_mixed else ClusterSpec, "cluster")
    _check_pools(cluster, layout)
    return Plan(
        model=strict(ModelSpec, "model"),
        cluster=cluster,
        training=strict(TrainingSpec, "training"),
        engine=strict(EngineSpec, "engine"),
        calibration=tuple(_strict(CalibrationEntry, each) for each in data["calibration"])
        if is_mixed
        else strict(CalibrationEntry, "calibration"),
        layout=layout,
        band=_band_from_dict(data.get("band")),
        memory=tuple(
            StageMemory(
                stage=stage["stage"],
                **_memory_from_dict(stage),
                host=HostMemory(**_memory_from_dict(host)) if (host := stage["host"]) else None,
            )
            for stage in data["memory"]
        ),
        time=tuple(
            TimeLine(**{**line, "name": LineName(line["name"]), **{key: _number(line, key) for key in _SECONDS}})
            for line in data["time"]
        ),
        runners_up=tuple(
            RunnerUp(
                layout=layout_from_dict(runner["layout"]),
                step_seconds=_number(runner, "step_seconds", above=0),
                peak_bytes=_number(runner, "peak_bytes"),
                reason=str(runner["reason"]),
                differs=str(runner["differs"]),
                near_tie=bool(runner["near_tie"]),
            )
            for runner in data["runners_up"]
        ),
        step_seconds=_number(data, "step_seconds", above=0),
        low_step_seconds=data["low_step_seconds"] and _number(data, "low_step_seconds", above=0),
        high_step_seconds=data["high_step_seconds"] and _number(data, "high_step_seconds", above=0),
        tokens_per_second_per_device=_number(data, "tokens_per_second_per_device"),
        mfu=_number(data, "mfu"),
        hfu=_number(data, "hfu"),
        idle_reason=str(data["idle_reason"]),
        **{key: data[key] for key in ("fits", "flops_convention", "certificate", "options")},
        batch=data["batch_choice"],
    )


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        InputError: the file is not a plan.
        EnvironmentProblem: the file cannot be read.
    """
    try:
        return plan_from_json(path.read_text(encoding="utf-8"), name=str(path))
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a plan: not UTF-8 text", hint=_HOW_TO_GET_ONE) from None
    except OSError as error:
        hint = _HOW_TO_GET_ONE if isinstance(error, FileNotFoundError) else ""
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}", hint=hint) from None


def write_plan(plan: Plan, path: Path, *, replace: bool = False) -> None:
    """Write a plan file, as `write_text` does."""
    write_text(path, [plan_to_json(plan)], replace=replace)


def write_text(path: Path, pieces: Iterable[str], *, replace: bool = False) -> None:
    """Write a file through a temporary file and a rename; an existing file is kept unless `replace`.

    Raises:
        InputError: the file exists and `replace` is false, or the path is a folder or a device.
        EnvironmentProblem: the folder cannot be written.
    """
    if path.exists() and not (replace and path.is_file()):
        why = "exists" if path.is_file() else "is not a file"
        raise InputError(f"{path} {why}", hint="add --force to replace a file, or choose another name")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from None
    finally:  # whatever ended it, also an interrupt
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
