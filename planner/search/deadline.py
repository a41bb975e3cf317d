"""A deadline that is kept with a chance: the longest step depends on how far off forecasts of a layout's kind are."""

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
"""Chance with which a deadline is kept, unless the user says otherwise (`--confidence`)."""

_MOST_SEARCHES: Final = 8
_Answer = TypeVar("_Answer")


def search_in_time(
    job: Job, constraints: Constraints, name: ObjectiveName, *, confidence: float, **options: Any
) -> Plan | NothingFits:
    """As `search`, by an objective that keeps to the deadline with this chance (`_in_time`)."""
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
    job: Job, constraints: Constraints, name: ObjectiveName, *, confidence: float, reporter: Reporter | None = None
) -> tuple[Layout, float] | None:
    """As `fastest_layout`, by an objective that keeps to the deadline with this chance (`_in_time`)."""
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
    """What `solve` finds by an objective that keeps to the deadline with this chance; answer: its layout and seconds.

    The first search has the longest step that any kind of layout may take, so that its answer is the best one where it
    keeps to the deadline. Where it does not, the step of its own kind is the limit of the next search. Layouts of
    another kind, whose forecasts are nearer, may then be ruled out between the two limits. Without a distribution of
    step times the forecast decides, as it does where the objective has no deadline.
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
    """Whether a chance of meeting the deadline is enough; where nobody knows it, the search has seen to that."""
    return chance is None or chance >= confidence


def _quantile(job: Job, layout: Layout, level: float) -> float:
    found = time_distribution(job, layout)
    return found.quantile(level) if found else 1.0


def _least_quantile(job: Job, level: float) -> float | None:
    """Of measured over predicted seconds at this level, the least of all kinds of layouts; None without evidence."""
    kinds = [
        Layout(tp=tp, pp=pp, dp=2, cp=cp, ep=ep, zero=zero, recompute=("none",), layers_per_stage=(1,))
        for tp, pp, cp, ep, zero in product((1, 2), (1, 2), (1, 2), (1, 2) if job.model.moe else (1,), (0, 3))
    ]
    if time_distribution(job, kinds[0]) is None:
        return None
    return min(_quantile(job, each, level) for each in kinds)
