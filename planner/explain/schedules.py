"""Compare all pipeline schedules on the job of a plan, with a small timeline of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from pydantic import Field

from planner.cost.compute import PassSeconds
from planner.cost.schedule import exists
from planner.cost.schedule_comparison import compare_schedules
from planner.cost.simulate import simulate
from planner.explain.plan_inputs import job_of
from planner.plan_parts import WrittenLayout
from planner.specs.document import Document

if TYPE_CHECKING:
    from planner.cost.schedule_comparison import ScheduleOutcome
    from planner.plan import Plan
    from planner.specs.recipe import Schedule

_SKETCH_STAGES: Final = 4
_SKETCH_MICROBATCHES: Final = 8
_TEXTBOOK: Final[dict[Schedule, str]] = {
    "naive": "p - 1",
    "gpipe": "(p - 1) / m",
    "1f1b": "(p - 1) / m",
    "interleaved": "(p - 1) / (v m)",
    "zb-h1": "(p - 1) / (3 m)",
    "zbv": "(p - 1) / (6 m)",
    "dualpipev": "(p - 1) / (3 m)",
    "pipedream": "0",
}
"""The textbook ratio of bubble to work, for equal stages with three passes of equal length."""


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
        "textbook": _TEXTBOOK[schedule],
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
