"""The ranking of layouts that are nearly as good as the best: whole numbers that are compared one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.cost.band import axes_of, features_of
from planner.cost.estimate import memory_of_stages
from planner.cost.run import devices_in_use
from planner.plan_parts import Keys
from planner.specs.recompute import is_of_some_layers, policy_code

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.specs.calibration import Evidence
    from planner.specs.job import Job

AXES: Final = ("tp", "pp", "cp", "ep")
"""Degrees that divide the model or a sequence; data parallelism is left out, because every job has it."""
RISKS: Final = (0.01, 0.05)
"""Upper limits of the classes of risk: the chance that a layout does not fit."""


def keys_of(job: Job, layout: Layout) -> Keys:
    """The keys of a layout, most important key first; `Keys` explains them."""
    inner = {layout.layers_per_stage[chunk] for r in range(1, layout.pp - 1) for chunk in layout.chunks_of_stage(r)}
    return Keys(
        machines=sum(-(-count // pool.devices_per_host) for pool, count in devices_in_use(job.cluster, layout)),
        unseen=int(axes_of(layout) not in {run.axes for run in runs_like(job, layout)}),
        axes=sum(getattr(layout, axis) > 1 for axis in AXES),
        by_hand=int(len(set(layout.recompute)) > 1 or is_of_some_layers(policy_code(layout.recompute[0]))),
        chunks=layout.interleave,
        risk=_risk_of(job, layout),
        uneven=int(len(inner) > 1),
    )


def runs_like(job: Job, layout: Layout) -> list[Evidence]:
    """The published runs of the layout's kind: of its engine, on models with experts, or without, as this one."""
    kind = (job.engine.name, job.model.moe is not None, features_of(job, layout))
    return [each for each in job.evidence if (each.engine, each.experts, each.features) == kind]


def _risk_of(job: Job, layout: Layout) -> int:
    """The class of the chance that the layout does not fit: how many of `RISKS` its riskiest stage exceeds."""
    if job.headroom is not None:  # a plain limit replaces the chance
        return 0
    chance = min(stage.chance_of_fitting for stage in memory_of_stages(job, layout))
    return sum(1 - chance > risk for risk in RISKS)
