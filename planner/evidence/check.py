"""Check a run against the plan that it ran, and against an earlier run: step time, memory, and layout."""

from __future__ import annotations

import math
import statistics
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from pydantic import Field

from planner.answers.plan_inputs import job_of
from planner.cost.chance import spread_of
from planner.cost.memory_band import memory_distribution
from planner.errors import InputError, Mistake
from planner.evidence.compare.score import memory_by_class
from planner.evidence.inputs import Measured, read_runs
from planner.evidence.logs.programs import OtherRun
from planner.specs.document import Document
from planner.specs.mistakes import Mistakes
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from planner.plan import Plan

_SCATTER: Final = 3.0
"""Standard deviations of a single baseline's steps by which the median step of a slower run exceeds it."""

_LEAST: Final = 0.03
"""Least such excess, as a share of the baseline's step; assumed, for what two starts of one program differ by."""

_STUDENT: Final = (31.82, 6.96, 4.54, 3.75, 3.36, 3.14, 3.00, 2.90, 2.82, 2.76)
"""The 99 % quantile of Student's t for 1 to 10 degrees of freedom; for more, see `limit_of`."""

_UPPER: Final = 0.9
"""Quantile at the upper end of a band, which holds 8 of 10 runs."""


class Reason(StrEnum):
    """What a check can fail on."""

    SLOWER = "slower"
    MEMORY = "memory"
    LAYOUT = "layout"


class Finding(Document):
    """One sentence of a check.

    holds: whether the run keeps up; null if nothing could be compared.
    failed: whether the check fails because of it.
    """

    reason: Reason
    holds: bool | None
    failed: bool
    text: str


class Check(Document):
    """A run beside its plan. A figure is null if the run, the plan or the evidence has none."""

    passed: bool
    findings: tuple[Finding, ...]
    step_seconds: float | None = Field(description="median step of the run, without warm-up")
    planned_step_seconds: float
    low_step_seconds: float | None
    high_step_seconds: float | None
    baseline_step_seconds: float | None
    baseline_limit_seconds: float | None = Field(description="a longer step is slower than the baseline")
    memory_bytes: float | None = Field(description="peak of the run, by the counter that it reports")
    memory_counter: str | None = Field(description="allocated, reserved or device")
    high_memory_bytes: float | None = Field(description="upper end of the plan's band of this counter")


def check_run(
    run: Path,
    plan: Plan,
    *,
    row: str = "",
    baseline: Path | None = None,
    fail_on: Collection[Reason] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Check:
    """Compare a run with a plan, and with an earlier run if there is a baseline.

    run: a run folder or a folder of several, a log or a metrics file, or a table of runs with the id of a `row`.
    baseline: the same, without a table. Of several runs on a side, the geometric mean of their median steps counts.
    fail_on: what makes the check fail; if empty, everything that can be compared.
    tell: called with notes on lines and cells that are left out.

    Raises:
        InputError: a file cannot be read as a run, or nothing tells what `fail_on` asks for, as of a run of another
            layout if `fail_on` leaves the layout out.
        EnvironmentProblem: a file cannot be opened.
    """
    asked = frozenset(fail_on or Reason)
    mistakes, before = Mistakes(), list[Measured]()
    if baseline and baseline.suffix == ".csv":
        hint = "give the log or the folder of a run"
        mistakes.add("a row of a table has no scatter to compare with", "--baseline", hint)
    elif baseline:
        before = mistakes.attempt(partial(read_runs, baseline, plan, tell=tell)) or []
    measured, limit, most, unknown = None, None, None, list[Mistake]()
    try:
        runs = read_runs(run, plan, row=row, tell=tell)
    except InputError as error:
        # nothing but the layout can be compared with another run
        if not isinstance(error, OtherRun) or Reason.LAYOUT not in asked:
            raise InputError(*mistakes.found, *error.mistakes) from None
        texts = [f"{each.where}: {each.message}" for each in error.mistakes]
        found = [Finding(reason=Reason.LAYOUT, holds=False, failed=True, text=each) for each in texts]
    else:
        measured = max(runs, key=lambda each: each.peak_bytes or 0)._replace(seconds=_mean(runs))
        limit = limit_of(before, runs) if before else None
        most = _most_bytes(plan, measured)
        found = [*_time(plan, measured, limit, asked), *_memory(measured, most, asked)]
        told = {each.reason for each in found}
        unknown = [_unknown(each) for each in (Reason.SLOWER, Reason.MEMORY) if each not in told]
    mistakes.raise_if_any()
    if lacking := [each for each in unknown if each.rule in fail_on]:
        raise InputError(*lacking)
    found += [
        Finding(reason=Reason(each.rule), holds=None, failed=False, text=f"not compared, because {each.message}")
        for each in unknown
    ]
    return Check(
        passed=not any(each.failed for each in found),
        findings=tuple(found),
        step_seconds=measured and measured.seconds,
        planned_step_seconds=plan.step_seconds,
        low_step_seconds=plan.low_step_seconds,
        high_step_seconds=plan.high_step_seconds,
        baseline_step_seconds=_mean(before) if limit else None,
        baseline_limit_seconds=limit,
        memory_bytes=measured and measured.peak_bytes,
        memory_counter=measured and measured.counter,
        high_memory_bytes=most,
    )


def _mean(runs: Sequence[Measured]) -> float:
    return statistics.geometric_mean(each.seconds for each in runs)


def limit_of(before: Sequence[Measured], runs: Sequence[Measured]) -> float:
    """The longest step of runs that keep up with the runs of a baseline.

    One run tells its own scatter only: the limit is three standard deviations of its steps. Several tell how far runs
    differ from each other, which their steps do not: the limit is the one-sided 99 % limit of Student's test of the
    logarithms, with a common variance.

    Source: Student, Biometrika 6 (1908); beyond ten degrees of freedom, the quantile is 2.33 + 4.3 / degrees (to 1 %).
    """
    start = _mean(before)
    if len(before) == 1:
        return start * (1 + max(_LEAST, _SCATTER * before[0].scatter))
    sides = [[math.log(each.seconds / _mean(side)) for each in side] for side in (before, runs)]
    freedom = len(before) + len(runs) - 2
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.33 + 4.3 / freedom
    variance = sum(each * each for side in sides for each in side) / freedom
    away = quantile * math.sqrt(variance * (1 / len(before) + 1 / len(runs)))
    return start * math.exp(max(math.log1p(_LEAST), away))


def _time(plan: Plan, measured: Measured, limit: float | None, asked: Collection[Reason]) -> Iterator[Finding]:
    """The step beside the plan's band and beside the baseline."""
    reason, took = Reason.SLOWER, f"a step takes {format_seconds(measured.seconds)}"
    low, high = plan.low_step_seconds, plan.high_step_seconds
    if low and high:
        slower, ends = measured.seconds > high, f"{format_seconds(low)} to {format_seconds(high)}"
        place = "longer than" if slower else "shorter than" if measured.seconds < low else "inside"
        text = f"{took}, {place} the plan's band of {ends}"
        yield Finding(reason=reason, holds=not slower, failed=slower and reason in asked, text=text)
    if limit:
        slower = measured.seconds > limit
        text = f"{took}, and the baseline with its scatter at most {format_seconds(limit)}"
        yield Finding(reason=reason, holds=not slower, failed=slower and reason in asked, text=text)


def _most_bytes(plan: Plan, measured: Measured) -> float | None:
    """The upper end of the plan's band of the fullest stage, for the counter of the run; None where nothing tells."""
    job = job_of(plan)
    if measured.counter is None or len(job.pools) > 1:
        return None
    own, counter = job.pools[0], measured.counter
    spread = memory_distribution(own, plan.layout, counter) or spread_of(own, plan.layout)
    fullest = max(memory_by_class(own, stage)[counter] for stage in plan.memory)
    return float(fullest * spread.quantile(_UPPER))


def _memory(measured: Measured, most: float | None, asked: Collection[Reason]) -> Iterator[Finding]:
    if measured.peak_bytes is None or most is None:
        return
    over, reason = measured.peak_bytes > most, Reason.MEMORY
    place = "over" if over else "at most"
    text = f"{measured.counter} memory of {format_bytes(measured.peak_bytes)}, {place} the {format_bytes(most)} that "
    yield Finding(reason=reason, holds=not over, failed=over and reason in asked, text=f"{text}the plan's band ends at")


def _unknown(reason: Reason) -> Mistake:
    """Why nothing tells what --fail-on asks for."""
    slower = reason == Reason.SLOWER
    words = "the plan has no band of step times" if slower else "the run's record tells no peak of a GPU's memory"
    hint = "add --baseline RUN, an earlier run" if slower else "leave it out of --fail-on"
    return Mistake(message=words, where=f"--fail-on {reason}", hint=hint, rule=reason)
