"""The job and the constraints that a plan was made from, out of the plan itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from planner.errors import InputError
from planner.search.constraints import Constraints
from planner.search.objectives import OBJECTIVES, objective_of
from planner.specs.cluster import MixedClusterSpec
from planner.specs.job import AnyJob, Job, MixedJob

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.search.objectives import Objective

__all__ = ["any_job_of", "constraints_of", "job_of", "objective_of_plan"]


def job_of(plan: Plan) -> Job:
    """As `any_job_of`, for what is answered for uniform clusters only.

    Raises:
        InputError: as there, or the cluster is a mixed one.
    """
    job = any_job_of(plan)
    if isinstance(job, MixedJob):
        message = f"{job.cluster.name} is a mixed cluster, and this is answered for clusters of one kind only"
        raise InputError(message, hint="`planner explain PLAN` shows its memory, time and neighbours, --json all lines")
    return job


def any_job_of(plan: Plan) -> AnyJob:
    """The job that was planned.

    Raises:
        InputError: the plan's options have been edited to what no job can have.
    """
    headroom = plan.options.get("headroom", 0.05)
    rules = {name: plan.options.get(name, False) for name in ("allow_tp_across_nodes", "allow_offload")}
    is_share = isinstance(headroom, int | float) and not isinstance(headroom, bool) and math.isfinite(headroom)
    if not is_share or not 0 <= headroom < 1 or not all(isinstance(lifted, bool) for lifted in rules.values()):
        raise InputError("the plan's options are not valid", hint="make the plan again")
    mixed = plan.cluster if isinstance(plan.cluster, MixedClusterSpec) else None
    pools = plan.cluster.pools
    entries = plan.calibration if isinstance(plan.calibration, tuple) else (plan.calibration,)
    if len(entries) != len(pools):
        raise InputError("the plan's calibration has not one entry for each pool", hint="make the plan again")
    jobs = tuple(
        Job(
            model=plan.model,
            cluster=pool,
            training=plan.training,
            engine=plan.engine,
            headroom=float(headroom),
            **rules,
            calibration=entry,
            between=mixed.between if mixed else None,
        )
        for pool, entry in zip(pools, entries, strict=True)
    )
    return MixedJob(cluster=mixed, pools=jobs) if mixed else jobs[0]


def objective_of_plan(plan: Plan) -> Objective:
    """What the plan was to be best at; of a layout of the user's, throughput.

    Raises:
        InputError: the plan's options have been edited to what is no objective.
    """
    name = plan.options.get("objective", "throughput")
    if name not in OBJECTIVES:
        raise InputError("the plan's objective is not valid", hint="make the plan again")
    return objective_of(job_of(plan), name)


def constraints_of(plan: Plan) -> Constraints:
    """The pins and forbidden combinations under which the plan was found; none for a layout of the user's.

    Raises:
        InputError: the plan's options have been edited to what nobody can pin.
    """
    return Constraints.parse(_texts(plan, "pins"), _texts(plan, "forbidden"))


def _texts(plan: Plan, key: str) -> list[str]:
    found: Any = plan.options.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InputError(f"the plan's {key} are not valid", hint="make the plan again")
    return found
