"""Read the inputs of `planner calibrate`: run folders, tables of runs, and logs with their plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from planner.accuracy.learn import Observation
from planner.calibrate.logs import read_log
from planner.calibrate.steps import Step, step_time
from planner.calibrate.tables import read_table
from planner.errors import EnvironmentProblem, InputError
from planner.explain.plan_inputs import job_of
from planner.made_by import with_shipped_corrections
from planner.reading import read_plan
from planner.specs.files import kind_of, limited_text
from planner.specs.mistakes import Mistakes
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from planner.plan import Plan

PLAN: Final = "plan.json"
METRICS: Final = "metrics.jsonl"


def read_inputs(
    paths: Sequence[Path], *, plan: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> list[Observation]:
    """The runs of every path, in order.

    plan: the plan of all logs; without it each log needs a plan.json in its folder.
    tell: called with a message and the reason for each run that is left out.

    Raises:
        InputError: all mistakes of all files, with file, line and column.
        EnvironmentProblem: a file cannot be read.
    """
    mistakes, found = Mistakes(), []
    for path in dict.fromkeys(paths):
        found += mistakes.attempt(_read, path, plan, tell) or []
    mistakes.raise_if_any()
    if not found:
        raise InputError("no run is left to learn from", hint="give a run that was measured and can be priced")
    return found


def _read(path: Path, plan: Path | None, tell: Callable[[str], None]) -> list[Observation]:
    shown = printable(str(path))
    if path.is_dir():
        return [_run_folder(path, tell)]
    if not path.exists():
        hint = "name a run folder of `planner launch`, a table of runs (.csv), or a log"
        raise InputError("no such file or folder", where=shown, hint=hint)
    if path.suffix == ".csv":
        return read_table(path, tell)
    return [_log(path, plan, tell)]


_LOGS: Final = {
    "a plan": "give the log of its run and --plan {path}, or the folder of `planner launch`",
    "a script": "give the log that its run wrote and --plan PLAN, or a table of runs (.csv)",
}


def _log(path: Path, plan: Path | None, tell: Callable[[str], None]) -> Observation:
    """The run that a log of another program records, with its plan."""
    if kind := kind_of(path.name, text_of(path)):
        shown = printable(str(path))
        raise InputError(f"{shown} is {kind}, and holds no times of steps", hint=_LOGS[kind].format(path=shown))
    beside = path.with_name(PLAN)
    if plan is None and not beside.is_file():
        hint = f"--plan PLAN names the plan that ran, or put it beside the log as {PLAN}"
        raise InputError("a log does not say what ran", where=printable(str(path)), hint=hint)
    read = read_plan(plan or beside, tell=tell)
    return _observed(read, read_log(printable(str(path)), text_of(path), read), path, tell)


def _run_folder(path: Path, tell: Callable[[str], None]) -> Observation:
    """The run that `planner launch` left in a folder."""
    if not (path / PLAN).is_file():
        hint = "name the folder that `planner launch --output` was given, or a log with --plan PLAN"
        raise InputError(f"no run: {PLAN} is missing", where=printable(str(path)), hint=hint)
    logs = sorted(path.glob("*.log"))
    if logs and not (path / METRICS).is_file():  # logs of a program started with files of `planner emit`
        return _log(logs[-1], path / PLAN, tell)
    if not (path / METRICS).is_file():
        hint = "train first, `planner launch`; it writes a line for each step"
        raise InputError(f"no run: {METRICS} is missing", where=printable(str(path)), hint=hint)
    steps = _metrics(path / METRICS)
    return _observed(read_plan(path / PLAN, tell=tell), steps, path / METRICS, tell, where=printable(str(path)))


def _observed(
    plan: Plan, steps: Sequence[Step], log: Path, tell: Callable[[str], None], *, where: str = ""
) -> Observation:
    found = step_time(steps, printable(str(log)))
    for note in found.notes:
        tell(note)
    job = with_shipped_corrections(job_of(plan))
    if len(job.pools) > 1:
        hint = "calibrate on a cluster of one kind of host: each pool has corrections of its own"
        raise InputError("the plan is for a mixed cluster", where=printable(str(log)), hint=hint)
    return Observation(
        where=where or printable(str(log)), job=job.pools[0], layout=plan.layout, measured_seconds=found.seconds
    )


def _metrics(path: Path) -> list[Step]:
    """The steps in the metrics file of the planner's trainer, which has a JSON object on each line."""
    shown, steps = printable(str(path)), []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        try:
            record: Any = json.loads(line)
            step, seconds, loss = int(record["step"]), float(record["step_seconds"]), record.get("loss")
            loss = None if loss is None else float(loss)
        except (ValueError, KeyError, TypeError) as error:
            column = error.colno if isinstance(error, json.JSONDecodeError) else 1
            hint = "cut the line out; the trainer writes `step` and `step_seconds` on each"
            raise InputError("no record of a step", where=f"{shown}:{number}:{column}", hint=hint) from None
        steps.append(Step(number=step, seconds=seconds, line=number, loss=loss))
    return steps


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
        InputError: the file is too large, or is not text.
        EnvironmentProblem: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return limited_text(file, printable(str(path)))
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {printable(str(path))}: {error.strerror}") from None
