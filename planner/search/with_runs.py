"""The fastest layout on axes that published runs have, beside a plan on axes that no published run of its kind has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.band import axes_of, band, features_of
from planner.errors import InputError
from planner.plan import WithRuns
from planner.search.best_first import best_first
from planner.search.decision import best_layout
from planner.search.objectives import BestKinds
from planner.search.reporter import Reporter
from planner.search.space.constraints import Condition

if TYPE_CHECKING:
    from planner.layout import Degrees, Layout
    from planner.numbers import Flag
    from planner.search.objectives import Objective
    from planner.search.space.space import Space

_AXES = ("tp", "pp", "cp", "ep", "fsdp")


def with_runs(space: Space, objective: Objective, plan: Layout, step_seconds: float) -> WithRuns | None:
    """The best layout on axes of published runs that the plan's band does not tell from the plan.

    Runs of the plan's kind are runs of its engine on models with experts, or without, as the plan's. The answer is None
    if some of them have the plan's axes, if there are none, or if such a layout takes longer than the band of the plan
    allows: then the plan is the faster one for all that is known.
    """
    job, constraints = space.job, space.constraints
    spread, has_experts = band(job, plan), job.model.moe is not None
    if spread is None or spread.low == spread.high:
        return None
    like = [
        each
        for each in job.evidence
        if (each.engine, each.experts, each.features) == (job.engine.name, has_experts, features_of(job, plan))
    ]
    if not like or axes_of(plan) in {each.axes for each in like}:
        return None
    others = _OtherAxes(key="axes", sign="!=", value="/".join(sorted({each.axes for each in like})))
    best = BestKinds(objective, 1)
    best.add(plan, objective.devices_of(job, plan), step_seconds * spread.high)
    elsewhere = space.under(replace(constraints, forbidden=(*constraints.forbidden, (others,))))
    try:
        found = best_first(elsewhere, best, Reporter(), has_incumbent=True)
    except InputError:  # no legal layout has such axes
        return None
    if not found.layouts:
        return None
    fastest = best_layout(found, objective)
    layout = found.layout_of(fastest)
    own = [each for each in like if each.axes == axes_of(layout)]
    return WithRuns(
        layout=layout,
        step_seconds=fastest.seconds,
        axes=axes_of(layout),
        num_runs=sum(len(each.ratios) for each in own),
        families=tuple(sorted({each.family or each.source for each in own})),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherAxes(Condition):
    """The condition that a layout divides the work along other axes than those in `value`, as `axes_of` writes them."""

    @property
    def is_numeric(self) -> bool:
        """The condition compares numbers, although its value is a list of words."""
        return True

    def holds(self, degrees: Degrees) -> Flag:
        """Whether each layout has other axes."""
        above = [getattr(degrees, axis) > 1 for axis in _AXES[:-1]]
        above.append((degrees.zero >= 2) & (degrees.dp * degrees.cp > 1))
        have = sum(np.asarray(each, dtype=np.int64) << place for place, each in enumerate(above))
        listed = [{*axes.split("+")} for axes in self.value.split("/")]
        codes = [sum((axis in axes) << place for place, axis in enumerate(_AXES)) for axes in listed]
        return ~np.isin(have, codes)
