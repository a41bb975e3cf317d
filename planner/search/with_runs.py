"""The best layout on axes that published runs have, beside a plan on axes that no published run of its kind has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.band import axes_of, band
from planner.errors import InputError
from planner.plan import WithRuns
from planner.search.best_first import best_first
from planner.search.decision import best_layout, rank_of
from planner.search.objectives import BestKinds
from planner.search.ranking import AXES, runs_like
from planner.search.recommendation import Window, recommended
from planner.search.reporter import Reporter
from planner.search.space.constraints import Condition

if TYPE_CHECKING:
    from planner.layout import Degrees, Layout
    from planner.numbers import Flag
    from planner.search.objectives import Objective
    from planner.search.space.space import Space


def with_runs(space: Space, objective: Objective, plan: Layout, step_seconds: float, within: float) -> WithRuns | None:
    """The easiest to run of the layouts on axes of published runs whose minimum the plan's band contains.

    The answer is None if some runs of the plan's kind (`ranking.runs_like`) have the plan's axes, if there are none, or
    if such a layout takes longer than the plan's band allows: then the plan is the faster one for all that is known.
    within: share by which the layout may exceed the minimum on such axes.
    """
    job, constraints = space.job, space.constraints
    spread, like = band(job, plan), runs_like(job, plan)
    if spread is None or spread.low == spread.high or not like or axes_of(plan) in {each.axes for each in like}:
        return None
    others = _OtherAxes(key="axes", sign="!=", value="/".join(sorted({each.axes for each in like})))
    longest = step_seconds * spread.high
    objective = replace(objective, longest_step_seconds=min(longest, objective.longest_step_seconds))
    best = BestKinds(objective, 1, within=within)
    best.add(plan, objective.devices_of(job, plan), longest)
    elsewhere = space.under(replace(constraints, forbidden=(*constraints.forbidden, (others,))))
    try:
        found = best_first(elsewhere, best, Reporter(), has_incumbent=True)
    except InputError:  # no legal layout has such axes
        return None
    if not found.layouts:
        return None
    least = rank_of(found, objective, best_layout(found, objective))
    chosen, _ = recommended(found, Window(objective=objective, minimum=least, within=within))
    layout = found.layout_of(chosen)
    own = [each for each in like if each.axes == axes_of(layout)]
    return WithRuns(
        layout=layout,
        step_seconds=chosen.seconds,
        axes=axes_of(layout),
        num_runs=sum(len(each.ratios) for each in own),
        families=tuple(sorted({each.family or each.source for each in own})),
    )


class _OtherAxes(Condition):
    """The condition that a layout divides the work along other axes than those in `value`, as `axes_of` writes them."""

    is_numeric = True  # it compares numbers, although its value is a list of words

    def holds(self, degrees: Degrees) -> Flag:
        """Whether each layout has other axes."""
        above = {axis: np.greater(getattr(degrees, axis), 1) for axis in AXES}
        above["fsdp"] = np.greater_equal(degrees.zero, 2) & np.greater(degrees.dp * degrees.cp, 1)
        listed = [axes.split("+") for axes in self.value.split("/")]
        alike = [np.logical_and.reduce([has == (axis in axes) for axis, has in above.items()]) for axes in listed]
        return np.logical_not(np.logical_or.reduce(alike))
