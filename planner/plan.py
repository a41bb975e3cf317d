"""The plan: the one document that all later steps read, complete, versioned and reproducible byte by byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, Field

from planner.cost.adapters import num_trained_params
from planner.cost.band import Band
from planner.cost.goodput import Checkpoint, Goodput, checkpoint_of, goodput
from planner.cost.ledger import MemoryLedger, StageMemory, TimeLine, Verdict, verdict_of, worst_stage
from planner.cost.run import WholeRun, devices_in_use, whole_run
from planner.errors import EnvironmentProblem, InputError
from planner.layout import LENGTH, Assumed, Layout
from planner.no_plan import PLAN_FORMAT
from planner.plan_parts import BatchChoice, Certificate, EngineLabel, Keys, MadeBy, SearchOptions
from planner.specs.calibration import CalibrationEntry, Spread
from planner.specs.cluster import AnyCluster, ClusterSpec
from planner.specs.engine import EngineSpec
from planner.specs.job import job_on
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from planner.specs.job import Job, PoolJob

Positive = Annotated[float, Field(gt=0)]
_NO_SPREAD: Final = Spread()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A layout that lost against the plan's layout, and the reason.

    reason: by how much it is slower, the ledger line in which it loses most, and what it saves or loses elsewhere.
    differs: the keys in which it differs from the plan, first the number of devices.
    near_tie: whether the forecasts are too inaccurate to decide which layout is faster.
    """

    layout: Layout
    step_seconds: Positive
    peak_bytes: float
    reason: str
    differs: str = ""
    near_tie: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The proven minimum of the objective, which is the plan's own layout or one that is harder to run.

    above: share by which the plan is worse than this minimum, by the objective.
    reason: what the plan gains in exchange, in words; empty if the plan is the minimum.
    """

    layout: Layout
    step_seconds: Positive
    peak_bytes: float
    keys: Keys
    above: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithRuns:
    """The best layout on axes that published runs of the plan's kind have, if no such run has the plan's own axes.

    axes: as `planner.cost.band.axes_of` writes them.
    num_runs, families: the runs with these axes, and who published them.
    """

    layout: Layout
    step_seconds: Positive
    axes: str
    num_runs: int
    families: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """A job, the layout chosen for it, and the ledger that explains the choice.

    Seconds are per optimizer step. 8 of 10 measured runs like the plan lie between `low_step_seconds` and
    `high_step_seconds`; `band` gives the number of runs behind this range. `mfu` and `hfu` use the convention named in
    `flops_convention`. On a mixed cluster there is one calibration for each pool. The chance of fitting is computed
    from `memory_spread`. A layout that the user gave has no certificate.
    slowest_of_mean: how much longer the slowest stage, whose lines `time` holds, takes than the mean of all stages.
    proved_by: version that made the certificate, if the plan was priced again with other formulas.
    assumed: values that the user's layout left out.
    minimum: the best layout by the objective, for comparison with the plan; None without a search.
    with_runs: the best layout with published runs, if the plan's axes have none; None without a search.
    own: the layout of the file from which the job was read (`--from`), compared with the plan's; None without.
    """

    model: ModelSpec
    cluster: AnyCluster
    training: TrainingSpec
    engine: EngineSpec
    layout: Layout
    memory: tuple[StageMemory, ...]
    time: tuple[TimeLine, ...]
    step_seconds: Positive
    low_step_seconds: Positive | None
    high_step_seconds: Positive | None
    calibration: tuple[CalibrationEntry, ...]
    tokens_per_second_per_device: float
    mfu: float
    hfu: float
    flops_convention: str
    made_by: MadeBy
    options: SearchOptions
    slowest_of_mean: Positive = 1.0
    memory_spread: Spread = _NO_SPREAD
    band: Band | None = None
    engine_label: EngineLabel | None = None  # effect of the engine's own calibration, if it is large
    minimum: Minimum | None = None
    deadline_chance: float | None = None
    budget_chance: float | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    with_runs: WithRuns | None = None
    own: RunnerUp | None = None
    idle_reason: str = ""
    batch: BatchChoice | None = None  # None if the batch size was given
    certificate: Certificate | None = None
    proved_by: MadeBy | None = None
    assumed: tuple[Assumed, ...] = ()

    @property
    def worst_stage(self) -> StageMemory:
        """The stage that decides whether the plan fits."""
        return worst_stage(self.memory)

    @property
    def unknown_because(self) -> tuple[str, ...]:
        """Keys of a foreign file that decide whether the plan fits and have no price."""
        return tuple(each.key for each in self.assumed if each.settled_by)

    @property
    def own_length(self) -> bool:
        """Whether the sequence length is the model's own, because nobody gave one."""
        return any(each.key == LENGTH for each in self.assumed)

    @property
    def idle_devices(self) -> int:
        """Devices of the cluster that the layout does not use."""
        return self.cluster.num_devices - self.layout.world_size

    @property
    def verdict(self) -> Verdict:
        """Whether the plan fits, in words: the verdict on its worst stage, if all that decides it has a price."""
        return "unknown" if self.unknown_because else verdict_of(self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None if that is unknown."""
        return None if self.verdict == "unknown" else self.verdict == "fits"

    @property
    def chance_of_fitting(self) -> float | None:
        """Chance that the plan fits: the chance of its worst stage, because all stages share one forecast error."""
        chances = [stage.chance_of_fitting for stage in self.memory]
        return None if self.verdict == "unknown" else min(chances, default=1.0)

    @property
    def run(self) -> WholeRun | None:
        """Time and cost of training on the whole token budget with this plan; None without a budget."""
        found = whole_run(
            self.model,
            self.training,
            step_seconds=self.step_seconds,
            in_use=devices_in_use(self.cluster, self.layout),
            effective_share=1.0 if self.goodput is None else self.goodput.effective_share,
        )
        return found and found.judged(
            (self.low_step_seconds, self.high_step_seconds),
            self.options.confidence,
            deadline_chance=self.deadline_chance,
            budget_chance=self.budget_chance,
        )

    @property
    def goodput(self) -> Goodput | None:
        """The shares of the run's time for training, checkpoints and failures; None if failures are not counted."""
        return goodput(*self._saving) if self.training.failures else None

    @property
    def checkpoint(self) -> Checkpoint:
        """Size of a checkpoint, and the time to write it."""
        return checkpoint_of(*self._saving)

    @property
    def _saving(self) -> tuple[PoolJob, tuple[tuple[ClusterSpec, int], ...]]:
        common = {"model": self.model, "training": self.training, "engine": self.engine}
        job = job_on(self.cluster, self.calibration, **common)
        return job.pools[0], devices_in_use(self.cluster, self.layout)

    def __repr__(self) -> str:
        return f"<Plan: {'; '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        """The plan in a notebook: a table without colours, which suits a dark page and a light one."""
        row = "<tr><th>{}</th><td>{}</td></tr>"
        return f"<table>{''.join(row.format(name, escape(text)) for name, text in self._facts().items())}</table>"

    def _facts(self) -> dict[str, str]:
        """What a reader asks first, in words without a line break."""
        degrees = {key: getattr(self.layout, key) for key in ("tp", "pp", "dp", "cp", "ep", "mbs", "zero")}
        layout = ", ".join(f"{key}={value}" for key, value in degrees.items() if value > (key != "zero"))
        stage, low, high = self.worst_stage, self.low_step_seconds, self.high_step_seconds
        band = f", in 8 of 10 runs {format_seconds(low)} to {format_seconds(high)}" if low and high else ""
        return {
            "model": self.model.name,
            "cluster": f"{self.layout.world_size:,} of {self.cluster.num_devices:,} devices of {self.cluster.name}",
            "layout": layout or "one device",
            "step": f"{format_seconds(self.step_seconds)}{band}",
            "speed": f"{format_count(self.tokens_per_second_per_device)} tokens/s per device, {self.mfu:.1%} MFU",
            "memory": f"{self.verdict}: {format_bytes(stage.total_bytes)} of {format_bytes(stage.limit_bytes)}",
        }

    def to_json(self) -> str:
        """The plan document as text, as `planner plan --json` prints it."""
        return plan_to_json(self)


def length_assumed(of: Plan | Job) -> list[Assumed]:
    """The sequence length, if nobody gave it and it is therefore the model's own; else nothing."""
    value = str(of.training.sequence_length)
    return [Assumed(key=LENGTH, value=value, rule="the model's own; --seq-len sets it")] if of.own_length else []


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan document as plain data (docs/formats.md)."""
    figures = {
        "format": PLAN_FORMAT,
        "world_size": plan.layout.world_size,
        "num_trained_params": num_trained_params(plan.model, plan.training),
        "run": plan.run and {**asdict(plan.run), "days": plan.run.days},
        "batch_choice": _plain(plan.batch),
        "memory": [_stage_memory_to_dict(stage, is_known=plan.fits is not None) for stage in plan.memory],
    }
    document = {key: figures[key] if key in figures else _plain(getattr(plan, key)) for key in PLAN_KEYS}
    return document | {"checksum": checksum(document)}


PLAN_KEYS: Final = (
    *("format", "made_by", "model", "cluster", "training", "engine", "layout", "assumed", "world_size"),
    *("idle_devices", "idle_reason", "fits", "verdict", "chance_of_fitting", "unknown_because", "step_seconds"),
    *("low_step_seconds", "high_step_seconds", "band", "engine_label", "deadline_chance", "budget_chance"),
    *("calibration", "memory_spread", "tokens_per_second_per_device", "mfu", "hfu", "num_trained_params"),
    *("flops_convention", "run", "goodput", "checkpoint", "batch_choice", "memory", "time", "slowest_of_mean"),
    *("minimum", "runners_up", "with_runs", "own", "certificate", "proved_by", "options"),
)
"""The keys of a plan document, in their order."""


def _plain(value: Any) -> Any:
    """A part of a plan as plain data."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Layout):
        return layout_to_dict(value)
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def checksum(document: dict[str, Any]) -> str:
    """Checksum of the keys before `checksum`; `explain --json` and other commands add their keys after it."""
    keys = list(document)
    own = keys[: keys.index("checksum")] if "checksum" in document else keys
    text = json.dumps({key: document[key] for key in own}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """The layout as plain data, one key for each field; `pools` and `segment` are left out if empty or 0."""
    values = {f.name: list(v) if isinstance(v := getattr(layout, f.name), tuple) else v for f in fields(Layout)}
    return {key: value for key, value in values.items() if key not in ("pools", "segment") or value}


def _stage_memory_to_dict(stage: StageMemory, *, is_known: bool) -> dict[str, Any]:
    verdicts = {key: getattr(stage, key) for key in ("fits", "verdict", "chance_of_fitting", "device_chance")}
    return {
        "stage": stage.stage,
        **(verdicts if is_known else dict.fromkeys(verdicts) | {"verdict": "unknown"}),
        **_memory_to_dict(stage, stage.stage),
        "host": stage.host
        and {"chance": stage.host.chance if is_known else None} | _memory_to_dict(stage.host, stage.stage),
    }


def _memory_to_dict(memory: MemoryLedger, stage: int) -> dict[str, Any]:
    sizes = {key: getattr(memory, key) for key in ("most_bytes", "total_bytes", "limit_bytes")}
    return sizes | {"lines": [{"stage": stage, **asdict(line)} for line in memory.lines]}


def plan_to_json(plan: Plan) -> str:
    """The plan document as text; equal plans give equal bytes."""
    return json.dumps(plan_to_dict(plan), indent=1, sort_keys=False, allow_nan=False, ensure_ascii=True) + "\n"


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
    finally:  # after success, an error or an interrupt
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_for(folder: Path) -> Iterator[None]:
    """Make a folder for files that are written meanwhile; after an error, only what was there before is left.

    Raises:
        EnvironmentProblem: the folder cannot be written.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    before: set[Path] = set()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            for path in (*set(folder.iterdir()) - before, *made):
                path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            raise EnvironmentProblem(f"cannot write {folder}: {error.strerror}") from None
        raise
