"""A deadline that is kept with a chance: the longest step depends on how far off forecasts of a layout's kind are."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from planner.cost.band import time_distribution
from planner.layout import Layout
from planner.plan import Plan
from planner.search.objectives import objective_of
from planner.search.search import search

if TYPE_CHECKING:
    from planner.plan_parts import ObjectiveName
    from planner.search.footprint import NothingFits
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job

_MOST_SEARCHES: Final = 8


def search_in_time(
    job: Job, constraints: Constraints, name: ObjectiveName, *, confidence: float, **options: Any
) -> Plan | NothingFits:
    """As `search`, by an objective that keeps to the deadline with this chance.

    The first search has the longest step that any kind of layout may take, so that its answer is the best one where it
    keeps to the deadline. Where it does not, the step of its own kind is the limit of the next search. Layouts of
    another kind, whose forecasts are nearer, may then be ruled out between the two limits. Without a distribution of
    step times the forecast decides, as it does where the objective has no deadline.
    """
    objective = objective_of(job, name)
    shortest = _least_quantile(job, confidence) if math.isfinite(objective.longest_step_seconds) else None
    if shortest is None:
        return _told(search(job, constraints, objective=objective, **options), confidence)
    longest = objective.longest_step_seconds
    limit = longest / shortest
    for _ in range(_MOST_SEARCHES):
        found = search(job, constraints, objective=replace(objective, longest_step_seconds=limit), **options)
        if not isinstance(found, Plan) or found.step_seconds > limit or _keeps(found, confidence):
            break
        limit = min(longest / _quantile(job, found.layout, confidence), found.step_seconds * (1 - 1e-9))
    return _told(found, confidence)


def _told(found: Plan | NothingFits, confidence: float) -> Plan | NothingFits:
    """The plan with the chance that was asked for."""
    if not isinstance(found, Plan):
        return found
    return replace(found, options=replace(found.options, confidence=confidence))


def _keeps(plan: Plan, confidence: float) -> bool:
    return plan.deadline_chance is None or plan.deadline_chance >= confidence


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
