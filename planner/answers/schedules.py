"""Compare all pipeline schedules on the job of a plan, with a small timeline of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from pydantic import Field
from rich.console import Group
from rich.text import Text

from planner.answers.plan_inputs import job_of
from planner.cost.compute import PassSeconds
from planner.cost.schedule import exists
from planner.cost.schedule_comparison import compare_schedules
from planner.cost.simulate import simulate
from planner.plan_parts import WrittenLayout
from planner.show.columns import Columns
from planner.show.figures import bytes_scale, seconds_scale
from planner.show.screen import clean, indented, section
from planner.specs.document import Document
from planner.specs.yaml import shipped_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from planner.cost.schedule_comparison import ScheduleOutcome
    from planner.plan import Plan
    from planner.show.figures import Scale
    from planner.specs.recipe import Schedule


_SKETCH_STAGES: Final = 4
_SKETCH_MICROBATCHES: Final = 8
_SAID: Final = shipped_yaml(Path(__file__).with_suffix(".yaml")).plain


class ScheduleRow(Document):
    """The plan's layout under one schedule; if there are no numbers, `missing` has the reason."""

    schedule: str
    engine_has_it: bool
    missing: str | None
    layout: WrittenLayout | None
    textbook: str = Field(
        description="bubble divided by work, for p equal stages, m microbatches, v chunks and equal passes"
    )
    step_seconds: float | None
    bubble_seconds: float | None
    bubble_share: float | None = Field(description="wait of the slowest stage, divided by its work")
    equal_stages_bubble_share: float | None = Field(description="bubble_share if every stage took the mean time")
    utilization: float | None = Field(description="work divided by work and bubble; m / (m + p - 1) for equal stages")
    activation_bytes: float | None
    peak_bytes: float | None
    fits: bool
    staleness_steps: int | None
    weight_versions: int | None


class Pass(Document):
    """One pass on one stage, in units of one forward pass of a chunk: F forward, B backward, I and W the parts of B."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


class SketchedSchedule(Document):
    """The passes of a small pipeline of equal stages; a forward pass and each half of a backward pass take 1."""

    schedule: str
    stages: int
    microbatches: int
    interleave: int
    passes: tuple[Pass, ...]


class Schedules(Document):
    """Every schedule on the plan's layout, and a sketch of each."""

    stages: int
    microbatches: int
    rows: tuple[ScheduleRow, ...]
    sketches: tuple[SketchedSchedule, ...] = Field(description="empty without a pipeline")


def schedules_of(plan: Plan) -> Schedules:
    """Compare all schedules; each row says whether the engine has the schedule.

    Raises:
        InputError: the plan's options are not valid.
    """
    layout = plan.layout
    found = compare_schedules(job_of(plan), layout)
    several = layout.interleave if layout.schedule == "interleaved" else 2
    sketches = (sketch(schedule, layout.pp, several) for schedule in found) if layout.pp > 1 else ()
    return Schedules(
        stages=layout.pp,
        microbatches=layout.num_microbatches(plan.training.global_batch_size),
        rows=tuple(_row(plan, schedule, each) for schedule, each in found.items()),
        sketches=tuple(sketches),
    )


def _row(plan: Plan, schedule: Schedule, found: ScheduleOutcome | str) -> ScheduleRow:
    said = {
        "schedule": schedule,
        "engine_has_it": schedule in plan.engine.pipeline.schedules,
        "missing": found if isinstance(found, str) else None,
        "textbook": _SAID["textbook"][schedule],
    }
    figures = {name: getattr(found, name, None) for name in ScheduleRow.model_fields if name not in said}
    return ScheduleRow.model_validate(said | figures | {"fits": bool(figures["fits"])})


def sketch(schedule: Schedule, num_stages: int, interleave: int) -> SketchedSchedule:
    """Run the schedule on a small pipeline of at most 4 stages, 8 microbatches and 2 chunks per stage."""
    stages, microbatches = min(num_stages, _SKETCH_STAGES), _SKETCH_MICROBATCHES
    chunks = min(interleave, 2) if schedule in ("interleaved", "zbv", "dualpipev") else 1
    while not exists(schedule, stages, microbatches, chunks):
        stages -= 1
    ones = np.ones(stages * chunks)
    seconds = PassSeconds(forward=ones, backward_input=ones, backward_weight=ones)
    run = simulate(schedule, seconds, microbatches, interleave=chunks)
    columns = (run.stage, run.kind, run.microbatch, run.chunk, run.start, run.end)
    passes = (
        Pass(stage=stage, kind=kind, microbatch=microbatch, chunk=chunk, start=start, end=end)
        for stage, kind, microbatch, chunk, start, end in zip(*(c.tolist() for c in columns), strict=True)
    )
    return SketchedSchedule(
        schedule=schedule, stages=stages, microbatches=microbatches, interleave=chunks, passes=tuple(passes)
    )


def schedules_section(found: Schedules) -> Group:
    """Show bubble, step time, memory and staleness of each schedule, then the drawings."""
    if found.stages == 1:
        words = "One stage: nobody waits, and every schedule is the same. A layout with stages, pp=4, compares them."
        return section("Schedules", Text(words))
    size = bytes_scale(each.activation_bytes or 0.0 for each in found.rows)
    time = seconds_scale(each.step_seconds or 0.0 for each in found.rows)
    rows = [_cells(each, time, size) for each in found.rows]
    header = ("", "bubble", "if equal", "textbook", f"step, {time.unit}", f"act., {size.unit}", "stale")
    table = Columns(rows, right=(1, 2, 4, 5, 6), optional=(2, 3), header=header)
    note = f"p = {found.stages} stages, m = {found.microbatches} microbatches"
    return Group(
        section("Schedules", table, _remarks(found.rows), Text(_SAID["columns"], style="dim"), note=note),
        Text(""),
        section(
            "Examples", *map(_Drawing, found.sketches), Text(_SAID["legend"], style="dim"), note=_sizes(found.sketches)
        ),
    )


def _sizes(sketches: Sequence[SketchedSchedule]) -> str:
    """Return the size of the drawn pipelines, which are smaller than the plan's."""
    each = max(sketches, key=lambda sketch: sketch.stages)
    return f"at most {each.stages} stages, {each.microbatches} microbatches; not the plan's own numbers"


def _cells(each: ScheduleRow, time: Scale, size: Scale) -> list[RenderableType]:
    name = Text(each.schedule, style="bold" if each.engine_has_it else "")
    if each.step_seconds is None or each.bubble_share is None:
        return [name, "", "", each.textbook, "", "", ""]
    return [
        name,
        _share(each.bubble_share),
        _share(each.equal_stages_bubble_share or 0.0),
        each.textbook,
        time(each.step_seconds),
        size(each.activation_bytes or 0.0),
        str(each.staleness_steps) if each.staleness_steps else "-",
    ]


def _remarks(rows: Sequence[ScheduleRow]) -> Columns:
    """List the rules that forbid schedules, each with the schedules that it forbids."""
    found: dict[str, list[str]] = {}
    for each in rows:
        versions = each.weight_versions or 1
        remarks = (
            ("not in this engine", not each.engine_has_it),
            ("does not fit", each.missing is None and not each.fits),
            (f"{versions} copies of weights", versions > 1),
            (each.missing or "", each.missing is not None),
        )
        for remark, holds in remarks:
            if holds:
                found.setdefault(remark, []).append(each.schedule)
    return Columns(
        [(", ".join(names), Text(clean(remark), style="dim")) for remark, names in found.items()], wrap=(0, 1)
    )


def _share(share: float) -> str:
    return f"{share:,.0%}" if share >= 10 else f"{share:.1%}"


class _Drawing:
    """A drawing with one row of characters per stage; rows wider than the screen end in `>`."""

    def __init__(self, found: SketchedSchedule) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._found.schedule, style="bold")
        width = options.max_width - 4
        for row in draw(self._found):
            cut = row if len(row) <= width else row[: width - 1] + ">"
            yield indented(Text(cut, no_wrap=True, overflow="crop"))


def draw(found: SketchedSchedule) -> list[str]:
    """Return a row of characters for each stage, one character per unit of time; a dot is waiting time."""
    length = round(max((each.end for each in found.passes), default=0.0))
    rows = [["."] * length for _ in range(found.stages)]
    for each in found.passes:
        row = rows[each.stage]
        for place in _own_places(each):
            row[place] = _mark(each)
    return ["".join(row) for row in rows]


def _own_places(each: Pass) -> range:
    """Return the character columns of a pass; of two overlapping passes the forward pass has the first half."""
    start, end = round(each.start), round(each.end)
    if end - start <= 2:
        return range(start, end)
    return range(start, start + 1) if each.kind == "F" else range(start + 1, end)


def _mark(each: Pass) -> str:
    if each.kind == "F":
        return str((each.microbatch + 1) % 10)
    letter = chr(ord("A") + each.microbatch % 26)
    return letter.lower() if each.kind == "W" else letter
