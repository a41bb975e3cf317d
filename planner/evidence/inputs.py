"""Read the inputs of `planner calibrate`: run folders, tables of runs, and logs with their plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planner.answers.difference import difference_of
from planner.answers.plan_inputs import job_of
from planner.errors import EnvironmentProblem, InputError, Mistake
from planner.evidence.logs.lines import lines_of, opened
from planner.evidence.logs.programs import Log, OtherRun, read_log
from planner.evidence.logs.steps import Step, StepTime, step_time
from planner.evidence.rows.observation import Observation, faults_of
from planner.evidence.rows.tables import read_table, row_of
from planner.made_by import with_shipped_corrections
from planner.reading import read_plan
from planner.specs.mistakes import Mistakes
from planner.specs.text import printable
from planner.specs.training import OF_THE_RUN
from planner.specs.yaml import MAX_MISTAKES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TextIO

    from planner.plan import Plan
    from planner.specs.calibration import Counter

PLAN: Final = "plan.json"
METRICS: Final = "metrics.jsonl"

_COUNTERS: Final[dict[str, Counter]] = {"allocated": "allocated", "reserved": "reserved", "device": "device"}
_MOST_STEPS: Final = 10**15


class _Source(NamedTuple):
    """A file with runs; where: its name in messages about the run; plan: what ran, None for a table."""

    file: Path
    where: str
    plan: Path | None = None


def read_inputs(
    paths: Sequence[Path], *, plan: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> list[Observation]:
    """The runs of every path, in order; a file that several paths name counts once.

    plan: the plan of all logs; without it each log needs a plan.json in its folder.
    tell: called with a message and the reason for each run that is left out.

    Raises:
        InputError: all mistakes of all files, with file, line and column.
        EnvironmentProblem: a file cannot be read.
    """
    mistakes, found, notes = Mistakes(), list[Observation](), list[str]()
    seen: dict[Path, str] = {}

    def note(text: str) -> None:
        notes.append(text)
        tell(text)

    for path in paths:
        for source in mistakes.attempt(_sources, path, plan, note) or ():
            file = source.file.resolve()
            if file in seen:
                note(f"{source.where}: read before, as {seen[file]}, and counted once")
                continue
            seen[file] = source.where
            found += mistakes.attempt(_read, source, note) or []
    mistakes.raise_if_any()
    if not found:
        hint = "give a run that was measured and can be priced"
        more = [f"and {len(notes) - MAX_MISTAKES} more"] if len(notes) > MAX_MISTAKES else []
        reasons = [Mistake(message=each) for each in (*notes[:MAX_MISTAKES], *more)]
        raise InputError(*reasons, Mistake(message="no run is left to learn from", hint=hint))
    return found


def _sources(path: Path, plan: Path | None, tell: Callable[[str], None]) -> list[_Source]:
    """The file that a path names, or the files of the run folders that it names."""
    try:
        return _of_folder(path, tell) if path.is_dir() else [_of_file(path, plan)]
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {printable(str(path))}: {error.strerror}") from None


def _of_file(path: Path, plan: Path | None) -> _Source:
    shown = printable(str(path))
    if not path.exists():
        hint = "name a run folder of `planner launch`, a table of runs (.csv), or a log"
        raise InputError("no such file or folder", where=shown, hint=hint)
    if path.suffix == ".csv":
        return _Source(path, shown)
    return _Source(path, shown, plan or path.with_name(PLAN))


def _of_folder(path: Path, tell: Callable[[str], None]) -> list[_Source]:
    """The record in a run folder, or the records of all run folders in a folder."""
    if (path / PLAN).is_file():
        return [_of_run(path, tell)]
    found = []
    for below in sorted(each.parent for each in path.glob(f"*/{PLAN}")):
        if (below / METRICS).is_file() or any(below.glob("*.log")):
            found.append(_of_run(below, tell))
        else:
            tell(f"{printable(str(below))}: no {METRICS} and no log, so the folder is left out")
    if not found:
        hint = (
            "name a folder of `planner launch --output`, or one that holds several; a log is named itself, with --plan"
        )
        words = f"no run: {PLAN} is missing, and no folder below has one with the record of a run"
        raise InputError(words, where=printable(str(path)), hint=hint)
    return found


def _of_run(folder: Path, tell: Callable[[str], None]) -> _Source:
    """The record in the folder of one run, by `planner launch` or by a program started with files of `planner emit`."""
    plan, shown = folder / PLAN, printable(str(folder))
    if (folder / METRICS).is_file():
        return _Source(folder / METRICS, shown, plan)
    logs = sorted(folder.glob("*.log"))
    if not logs:
        hint = "train first, `planner launch`; it writes a line for each step"
        raise InputError(f"no run: {METRICS} is missing", where=shown, hint=hint)
    *others, log = logs
    if others:
        names = ", ".join(printable(each.name) for each in others)
        tell(f"{shown}: {printable(log.name)} is read, the last of its logs by name, and not {names}")
    return _Source(log, printable(str(log)), plan)


class Measured(NamedTuple):
    """What a run measured; scatter: of its steps, as a share; counter: of the peak, where the record tells one."""

    seconds: float
    scatter: float = 0.0
    peak_bytes: float | None = None
    counter: Counter | None = None


def read_runs(path: Path, plan: Plan, *, row: str = "", tell: Callable[[str], None] = lambda _: None) -> list[Measured]:
    """What runs of a plan measured: a run folder or a folder of such, a log, a metrics file, or a row of a table.

    Raises:
        OtherRun: a record says that another model, batch, layout or program ran.
        InputError: the file cannot be read as a run.
        EnvironmentProblem: a file cannot be opened.
    """
    sources = _sources(path, None, tell)
    if sources[0].plan is None:
        return [_measured_row(path, plan, row)]
    if row:
        raise InputError("--row is for a table of runs (.csv)", where=printable(str(path)))
    return [_measured_run(each, path, plan, tell) for each in sources]


def _measured_run(source: _Source, path: Path, plan: Plan, tell: Callable[[str], None]) -> Measured:
    file, where, beside = source
    if file != path and beside is not None and (other := _changed(read_plan(beside, tell=tell), plan, where)):
        raise OtherRun(*other)
    log = _log(file, plan, tell)
    found = _timed(log.steps, where, tell)
    on_cpu = any(pool.device.kind == "cpu" for pool in plan.cluster.pools)  # its peak is the process's, libraries too
    return Measured(found.seconds, found.scatter, *((not on_cpu and log.peak) or (None, None)))


def _measured_row(path: Path, plan: Plan, row: str) -> Measured:
    """The figures of a row, if each cell that it states is the plan's."""
    where, run = row_of(path, row)
    if not run.measured_step_seconds:
        raise InputError("the row has no step time", where=where, hint="give it in step_s, or in tok_s_gpu")
    model, training, layout = plan.model, plan.training, plan.layout
    planned = {"layers": model.num_layers, "hidden": model.hidden_size, "gpus": layout.world_size}
    planned |= {"seq": training.sequence_length, "gbs": training.global_batch_size, "zero_stage": layout.zero}
    planned |= {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "dp", "mbs", "interleave")}
    stated = {name: getattr(run, name) for name in planned}
    other = [
        Mistake(message=f"{name} is {stated[name]}, and {value} in the plan", where=where)
        for name, value in planned.items()
        if stated[name] not in (None, value)
    ]
    if other:
        raise OtherRun(*other)
    counter = _COUNTERS.get(run.mem_class)
    return Measured(run.measured_step_seconds, peak_bytes=run.mem_bytes if counter else None, counter=counter)


def _changed(ran: Plan, plan: Plan, where: str) -> list[Mistake]:
    """The keys of model, training, engine and layout in which the plan of a folder differs from another."""
    found = difference_of(plan, ran)
    differing = {each.path: each for each in (*found.inputs, *found.layout) if _matters(each.path)}
    return [
        Mistake(message=f"{path} is {each.after or 'absent'}, and {each.before or 'absent'} in the plan", where=where)
        for path, each in differing.items()
    ]


def _matters(path: str) -> bool:
    """Whether a key of a plan decides what a step of its run does: not its price, its length or the corrections."""
    document, _, key = path.partition(".")
    if document in ("cluster", "calibration", "options", "engine"):
        return path == "engine.name"
    return document != "training" or key not in _OF_THE_WHOLE_RUN


_OF_THE_WHOLE_RUN: Final = (
    *OF_THE_RUN,
    *("tokens", "deadline", "budget", "price", "failures", "checkpoint_interval", "asynchronous_checkpoints"),
)


def _read(source: _Source, tell: Callable[[str], None]) -> list[Observation]:
    """The runs of a file: the rows of a table, or the run that a log records."""
    file, where, beside = source
    if beside is None:
        return read_table(file, tell)
    shown = printable(str(file))
    if beside == file.with_name(PLAN) and not beside.is_file():
        hint = f"--plan PLAN names the plan that ran, or put it beside the log as {PLAN}"
        raise InputError("a log does not say what ran", where=shown, hint=hint)
    plan = read_plan(beside, tell=tell)
    return [_observed(plan, _log(file, plan, tell).steps, shown, where, tell)]


def _log(file: Path, plan: Plan, tell: Callable[[str], None]) -> Log:
    """The steps and the peak that a log or a metrics file tells."""
    shown = printable(str(file))
    with opened(file) as text:
        return _metrics(shown, text) if file.name == METRICS else read_log(shown, text, plan, tell)


def _observed(plan: Plan, steps: Sequence[Step], shown: str, where: str, tell: Callable[[str], None]) -> Observation:
    found = _timed(steps, shown, tell)
    job = with_shipped_corrections(job_of(plan))
    if len(job.pools) > 1:
        hint = "calibrate on a cluster of one kind of host: each pool has corrections of its own"
        raise InputError("the plan is for a mixed cluster", where=shown, hint=hint)
    observed = Observation(where=where, job=job.pools[0], layout=plan.layout, measured_seconds=found.seconds)
    impossible, doubtful = faults_of(observed)
    if impossible:
        hint = "are these seconds where milliseconds belong? Or give the plan that this log ran"
        raise InputError(impossible, where=shown, hint=hint)
    if doubtful:
        tell(f"{shown}: {doubtful}")
    return observed


def _timed(steps: Sequence[Step], name: str, tell: Callable[[str], None]) -> StepTime:
    found = step_time(steps, name)
    for note in found.notes:
        tell(note)
    return found


def _metrics(shown: str, file: TextIO) -> Log:
    """The steps in the metrics file of the planner's trainer, which has a JSON object on each line."""
    steps, peak = [], 0.0
    for line in lines_of(file, shown):
        try:
            record: Any = json.loads(line.text)
            step, seconds, loss = int(record["step"]), float(record["step_seconds"]), record.get("loss")
            loss = None if loss is None else float(loss)
            peak = max(peak, float(record.get("peak_memory_bytes") or 0))
            if abs(step) > _MOST_STEPS:
                raise ValueError("no number of a step")  # noqa: TRY301
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            column = error.colno if isinstance(error, json.JSONDecodeError) else 1
            hint = "cut the line out; the trainer writes `step` and `step_seconds` on each"
            raise InputError("no record of a step", where=f"{shown}:{line.number}:{column}", hint=hint) from None
        steps.append(Step(number=step, seconds=seconds, line=line.number, loss=loss))
    return Log(steps, (peak, "allocated") if peak else None)
