"""The job and the constraints of a plan, read from the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.made_by import with_shipped_corrections
from planner.search.space.constraints import Constraints
from planner.specs.job import job_on

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.specs.job import Job


def job_of(plan: Plan) -> Job:
    """The job of the plan.

    The plan stores the corrections of its calibration, but not the evidence on forecast errors. A job with shipped
    corrections has the evidence that this version ships; a job with the user's own corrections has none.
    """
    job = job_on(
        plan.cluster,
        plan.calibration,
        model=plan.model,
        training=plan.training,
        engine=plan.engine,
        spread=plan.memory_spread,
        risk=plan.options.risk,
        headroom=plan.options.headroom,
        allow_tp_across_nodes=plan.options.allow_tp_across_nodes,
        allow_offload=plan.options.allow_offload,
    )
    return with_shipped_corrections(job) if plan.made_by.calibration == "shipped" else job


def constraints_of(plan: Plan) -> Constraints:
    """The pins and forbidden combinations of the plan's search; empty if the user gave the layout.

    Raises:
        InputError: a stored pin is not valid.
    """
    return Constraints.parse(plan.options.pins, plan.options.forbidden)
