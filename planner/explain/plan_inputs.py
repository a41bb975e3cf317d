"""The job and the constraints that a plan was made from, out of the plan itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from planner.errors import InputError
from planner.search.objectives import OBJECTIVES, objective_of
from planner.search.space.constraints import Constraints
from planner.specs.job import job_on

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.search.objectives import Objective
    from planner.specs.job import Job

__all__ = ["constraints_of", "job_of", "objective_of_plan"]


def job_of(plan: Plan) -> Job:
    """The job that was planned.

    Raises:
        InputError: the plan's options have been edited to what no job can have.
    """
    headroom = plan.options.get("headroom", 0.05)
    rules = {name: plan.options.get(name, False) for name in ("allow_tp_across_nodes", "allow_offload")}
    is_share = isinstance(headroom, int | float) and not isinstance(headroom, bool) and math.isfinite(headroom)
    if not is_share or not 0 <= headroom < 1 or not all(isinstance(lifted, bool) for lifted in rules.values()):
        raise InputError("the plan's options are not valid", hint="make the plan again")
    if len(plan.calibration) != len(plan.cluster.pools):
        raise InputError("the plan's calibration has not one entry for each pool", hint="make the plan again")
    common = {"model": plan.model, "training": plan.training, "engine": plan.engine}
    return job_on(plan.cluster, plan.calibration, **common, headroom=float(headroom), **rules)


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
