"""Searches that keep deadline and budget with a given chance: larger forecast errors allow only shorter steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeVar

from planner.cost.band import chance_of_budget, chance_of_deadline, time_distribution
from planner.layout import Layout
from planner.plan import Plan
from planner.search.footprint import NothingFits
from planner.search.objectives import LIMITS, objective_of
from planner.search.search import fastest_layout, search

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.plan_parts import ObjectiveName
    from planner.search.reporter import Reporter
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


_MOST_SEARCHES: Final = 8
_Answer = TypeVar("_Answer")


def search_in_time(
    job: Job, constraints: Constraints, name: ObjectiveName, *, confidence: float, **options: Any
) -> Plan | NothingFits:
    """`search` under an objective that keeps its limits with the chance `confidence` (`_in_time`)."""
    solve = partial(search, job, constraints, **options)
    found = _in_time(job, name, confidence, solve, lambda found: (found.layout, found.step_seconds))
    return replace(found, options=replace(found.options, confidence=confidence)) if isinstance(found, Plan) else found


def fastest_in_time(
    job: Job, constraints: Constraints, name: ObjectiveName, confidence: float, *, reporter: Reporter | None = None
) -> tuple[Layout, float] | None:
    """`fastest_layout` under an objective that keeps its limits with the chance `confidence` (`_in_time`)."""
    return _in_time(job, name, confidence, partial(fastest_layout, job, constraints, reporter), lambda found: found)


def _in_time(
    job: Job, name: ObjectiveName, confidence: float, solve: Callable[..., _Answer], answer: Callable[[Any], Any]
) -> _Answer:
    """The result of `solve` under an objective that keeps the deadline and the budget with the chance `confidence`.

    solve: gets the keyword `objective`.
    answer: extracts the layout and its seconds from a result.

    The first search allows the longest step that any kind of layout may take. If its answer keeps the limits, it is
    the best layout. Otherwise the limit of the next search is the longest step that the answer's own kind may take.
    This limit may rule out other kinds with smaller forecast errors. Without a distribution of step times, or without
    limits, the forecast alone decides.
    """
    objective = objective_of(job, name)
    quantile = _least_quantile(job, confidence) if objective.is_limited else None
    if quantile is None:
        return solve(objective=objective)
    for _ in range(_MOST_SEARCHES):
        found = solve(objective=objective.over(quantile))
        if found is None or isinstance(found, NothingFits):
            break
        layout, seconds = answer(found)
        longest = objective.longest_seconds(objective.devices_of(job, layout))
        if seconds * quantile > longest or is_kept(job, layout, seconds, name, confidence):
            break
        quantile = max(_quantile(job, layout, confidence), longest / seconds * (1 + 1e-9))
    return found


def is_kept(job: Job, layout: Layout, seconds: float, name: ObjectiveName, confidence: float) -> bool:
    """Whether the chances of meeting the requirements that an objective has (`LIMITS`) are enough.

    An unknown chance is enough. Such a requirement is left to the forecast, which the search checks.
    """
    chance_of = {"deadline": chance_of_deadline, "budget": chance_of_budget}
    chances = [chance_of[limit](job, layout, seconds) for limit in LIMITS[name]]
    return all(chance is None or chance >= confidence for chance in chances)


def excess(job: Job, layout: Layout, step_seconds: float, name: ObjectiveName, confidence: float) -> float:
    """How many times as large the limits of an objective have to be for a layout to keep them with the confidence."""
    objective = objective_of(job, name)
    longest = objective.longest_seconds(objective.devices_of(job, layout))
    return float(step_seconds * _quantile(job, layout, confidence) / longest)


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
