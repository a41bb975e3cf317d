"""The same layout with more or fewer replicas, without planning again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from planner.cost.estimate import estimate
from planner.cost.run import devices_in_use
from planner.cost.segments import with_segment
from planner.errors import InputError
from planner.explain.plan_inputs import job_of
from planner.search.space.rules import broken_rules
from planner.specs.change import change_job

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.plan import Plan
    from planner.specs.job import Job

_DOUBLINGS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCount:
    """The layout with another data-parallel degree at the same global batch (strong scaling)."""

    num_devices: int
    step_seconds: float
    fits: bool


def replicas_of(plan: Plan) -> tuple[ReplicaCount, ...]:
    """The layout with the data-parallel degree halved and doubled, as often as the rules allow.

    Raises:
        InputError: the plan's options are not valid.
    """
    job, layout = job_of(plan), plan.layout
    found = []
    for power in range(-_DOUBLINGS, _DOUBLINGS + 1):
        dp = layout.dp * 2**power
        if dp != int(dp):
            continue
        other = replace(layout, dp=int(dp))
        try:
            sized = job if power == 0 else change_job(job, _size_for(job, other))
        except InputError:  # no cluster has this number of devices
            continue
        other = with_segment(sized.cluster, other)
        if power and broken_rules(sized, other):
            continue
        priced = estimate(sized, other)
        found.append(ReplicaCount(num_devices=other.world_size, step_seconds=priced.step_seconds, fits=priced.fits))
    return tuple(found)


def _size_for(job: Job, layout: Layout) -> str:
    """The `--set` change that gives the cluster as many devices as the layout has.

    In a mixed cluster, each pool gets hosts for its stages.
    """
    if len(job.pools) == 1:
        return f"gpus={layout.world_size}"
    in_use = devices_in_use(job.cluster, layout)
    return ",".join(f"{pool.name}.hosts={-(-count // pool.devices_per_host)}" for pool, count in in_use)
