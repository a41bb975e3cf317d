"""Searches that keep a deadline with a given chance: the larger the forecast error, the shorter the allowed step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeVar

from planner.cost.band import chance_of_deadline, time_distribution
from planner.layout import Layout
from planner.plan import Plan
from planner.search.objectives import objective_of
from planner.search.search import fastest_layout, search

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.plan_parts import ObjectiveName
    from planner.search.footprint import NothingFits
    from planner.search.objectives import Objective
    from planner.search.reporter import Reporter
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job

CONFIDENCE: Final = 0.8
"""Default of the required chance that a plan meets its deadline (`--confidence`)."""

_MOST_SEARCHES: Final = 8
_Answer = TypeVar("_Answer")


def search_in_time(
    job: Job, constraints: Constraints, name: ObjectiveName, *, confidence: float, **options: Any
) -> Plan | NothingFits:
    """`search` under an objective that keeps the deadline with the chance `confidence` (`_in_time`)."""
    found = _in_time(
        job,
        name,
        confidence,
        solve=lambda objective: search(job, constraints, objective=objective, **options),
        answer=lambda found: (found.layout, found.step_seconds) if isinstance(found, Plan) else None,
    )
    if not isinstance(found, Plan):
        return found
    return replace(found, options=replace(found.options, confidence=confidence))


def fastest_in_time(
    job: Job, constraints: Constraints, name: ObjectiveName, confidence: float, *, reporter: Reporter | None = None
) -> tuple[Layout, float] | None:
    """`fastest_layout` under an objective that keeps the deadline with the chance `confidence` (`_in_time`)."""
    return _in_time(
        job,
        name,
        confidence,
        solve=lambda objective: fastest_layout(job, constraints, reporter, objective=objective),
        answer=lambda found: found,
    )


def _in_time(
    job: Job,
    name: ObjectiveName,
    confidence: float,
    *,
    solve: Callable[[Objective], _Answer],
    answer: Callable[[_Answer], tuple[Layout, float] | None],
) -> _Answer:
    """The result of `solve` under an objective that keeps the deadline with the chance `confidence`.

    answer: extracts the layout and its seconds from a result.

    The first search allows the longest step that any kind of layout may take. If its answer keeps the deadline, it is
    the best layout. Otherwise the limit of the next search is the longest step that the answer's own kind may take.
    This limit may rule out other kinds with smaller forecast errors. Without a distribution of step times, or without a
    deadline, the forecast alone decides.
    """
    objective = objective_of(job, name)
    shortest = _least_quantile(job, confidence) if math.isfinite(objective.longest_step_seconds) else None
    if shortest is None:
        return solve(objective)
    longest = objective.longest_step_seconds
    limit = longest / shortest
    for _ in range(_MOST_SEARCHES):
        found = solve(replace(objective, longest_step_seconds=limit))
        layout, seconds = answer(found) or (None, math.inf)
        if layout is None or seconds > limit or keeps_deadline(chance_of_deadline(job, layout, seconds), confidence):
            break
        limit = min(longest / _quantile(job, layout, confidence), seconds * (1 - 1e-9))
    return found


def keeps_deadline(chance: float | None, confidence: float) -> bool:
    """Whether a chance of meeting the deadline is enough.

    If the chance is unknown, the result is true, because the search has already checked the forecast.
    """
    return chance is None or chance >= confidence


def lateness(job: Job, layout: Layout, step_seconds: float, name: ObjectiveName, confidence: float) -> float:
    """How many times as long the deadline has to be for a layout to keep it with the chance `confidence`."""
    return step_seconds * _quantile(job, layout, confidence) / objective_of(job, name).longest_step_seconds


def _quantile(job: Job, layout: Layout, level: float) -> float:
    found = time_distribution(job, layout)
    return found.quantile(level) if found else 1.0


def _least_quantile(job: Job, level: float) -> float | None:
    """The least quantile of measured / predicted seconds among all kinds of layouts; None without evidence."""
    kinds = [
        Layout(tp=tp, pp=pp, dp=2, cp=cp, ep=ep, zero=zero, recompute=("none",), layers_per_stage=(1,))
        for tp, pp, cp, ep, zero in product((1, 2), (1, 2), (1, 2), (1, 2) if job.model.moe else (1,), (0, 3))
    ]
    if time_distribution(job, kinds[0]) is None:
        return None
    return min(_quantile(job, each, level) for each in kinds)
