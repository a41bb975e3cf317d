"""All pipeline schedules side by side, for one job and one layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, get_args

import numpy as np

from planner.cost.estimate import estimate, timeline
from planner.cost.ledger import LineName
from planner.cost.prices import layout_prices
from planner.cost.schedule import bubble_of, exists, staleness_steps, weight_versions
from planner.layout import Layout, balanced_chunks, of_chunks
from planner.specs.recipe import Schedule

if TYPE_CHECKING:
    from planner.specs.job import Job

SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)
"""Every schedule that is priced, in order of publication."""


_BOUNDED: Final = ("gpipe", "1f1b", "interleaved")
"""Schedules that `estimate` prices with a closed form, which can be inexact for unequal stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOutcome:
    """Results of one schedule for a layout: time, bubble, memory, staleness.

    layout: the layout with this schedule and its number of chunks; each stage holds the same layers as before.
    runs: whether the job's engine has this schedule.
    step_seconds: result of `estimate`.
    executed_step_seconds: step time with the passes executed one by one; it differs from step_seconds where the closed
        form of GPipe, 1F1B or interleaved is inexact, that is, for unequal stages.
    pipeline_seconds: the passes of executed_step_seconds alone, without gradient reduction and optimizer, which
        pipedream repeats for every microbatch.
    bubble_seconds: wait of the slowest stage, executed (0 for pipedream, whose pipeline is never drained).
    bubble_share: bubble_seconds divided by the seconds that the stage works: (p - 1) / m for equal stages under GPipe
        and 1F1B.
    equal_stages_bubble_share: the same ratio if every stage took the mean time, as in textbooks.
    utilization: work of the slowest stage divided by the sum of its work and bubble: m / (m + p - 1) for equal stages.
    activation_bytes: largest stored activations of any stage.
    peak_bytes: largest peak of any stage.
    fits: whether every stage fits.
    staleness_steps, weight_versions: largest of any stage; 0 and 1 except for pipedream.
    """

    schedule: Schedule
    layout: Layout
    runs: bool
    step_seconds: float
    executed_step_seconds: float
    pipeline_seconds: float
    bubble_seconds: float
    bubble_share: float
    equal_stages_bubble_share: float
    utilization: float
    activation_bytes: float
    peak_bytes: float
    fits: bool
    staleness_steps: int
    weight_versions: int


def with_schedule(layout: Layout, schedule: Schedule) -> Layout | None:
    """The same stages under another schedule, or None if a stage has too few layers for its chunks.

    A V-shaped schedule has two chunks per stage. Under `interleaved` an interleaved layout keeps its number of chunks,
    and any other layout gets two. The remaining schedules have one chunk.
    """
    if schedule == layout.schedule:
        return layout
    several = layout.interleave if layout.schedule == "interleaved" and layout.interleave > 1 else 2
    interleave = {"interleaved": several, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    layers = tuple(layout.layers_of_stage(r) for r in range(layout.pp))
    policies = tuple(layout.recompute_of_stage(r) for r in range(layout.pp))
    if min(layers) < interleave > 1:
        return None
    return replace(
        layout,
        mtp=layout.mtp if interleave == layout.interleave else (),
        schedule=schedule,
        interleave=interleave,
        layers_per_stage=balanced_chunks(layers, interleave, schedule),
        recompute=of_chunks(policies, interleave, schedule),
    )


def compare_schedules(job: Job, layout: Layout) -> dict[Schedule, ScheduleOutcome | str]:
    """Results of each schedule of `SCHEDULES` for this layout, or the reason why the schedule is undefined here.

    The results are meant for a printed table, so the other rules for legal layouts are not checked.

    Source: `estimate` for prices, `timeline` for the executed times.
    """
    m = layout.num_microbatches(job.training.global_batch_size)
    return {schedule: _outcome(job, layout, schedule, m) for schedule in SCHEDULES}


def _outcome(job: Job, layout: Layout, schedule: Schedule, m: int) -> ScheduleOutcome | str:
    other = with_schedule(layout, schedule)
    if other is None:
        return "a stage has fewer layers than chunks"
    if not exists(schedule, other.pp, m, other.interleave):
        if schedule == "dualpipev":
            return f"it needs at least {2 * other.pp} microbatches, not {m}"
        return f"it needs microbatches in equal rounds of at least {other.pp}, and {m} do not divide into such rounds"
    priced = estimate(job, other)
    bubble_line = next(line for line in priced.time if line.name == LineName.BUBBLE)
    work = priced.pipeline_seconds - float(bubble_line.busy_seconds)
    executed = timeline(job, other).seconds if schedule in _BOUNDED else priced.pipeline_seconds
    stages = np.arange(other.pp)
    activations = [line.num_bytes for s in priced.memory for line in s.lines if line.name == LineName.ACTIVATIONS]
    bubble = max(0.0, executed - work)
    return ScheduleOutcome(
        schedule=schedule,
        layout=other,
        runs=schedule in job.engine.pipeline.schedules,
        step_seconds=priced.step_seconds,
        executed_step_seconds=executed + priced.tail_seconds,
        pipeline_seconds=executed,
        bubble_seconds=bubble,
        bubble_share=bubble / work,
        equal_stages_bubble_share=_equal_stages_bubble_share(job, other, m),
        utilization=work / (work + bubble),
        activation_bytes=max(map(float, activations)),
        peak_bytes=priced.peak_bytes,
        fits=priced.fits,
        staleness_steps=int(np.max(staleness_steps(schedule, other.pp, stages, m))),
        weight_versions=int(np.max(weight_versions(schedule, other.pp, stages, m))),
    )


def _equal_stages_bubble_share(job: Job, layout: Layout, m: int) -> float:
    """Ratio of bubble to work if every stage took the mean time of all stages.

    Source: `bubble_of`.
    """
    passes = layout_prices(job, layout).passes
    mean = passes.each(lambda seconds: np.full(layout.pp, np.mean(np.broadcast_to(seconds, layout.pp))))
    bubble = bubble_of(layout.schedule, mean, num_microbatches=m, interleave=layout.interleave)
    return float(bubble) / (m * float(np.mean(passes.total)))
