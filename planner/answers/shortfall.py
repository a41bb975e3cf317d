"""What an answer lacks of what was asked for, and the searches for what would help."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.answers.plan_inputs import constraints_of, job_of
from planner.asked import plannable
from planner.plan import Plan
from planner.plan_parts import CONFIDENCE
from planner.search.objectives import LIMITS

if TYPE_CHECKING:
    from planner.answers.remedies import InTime, LiftedPin, Remedy
    from planner.answers.side_by_side import Choice, SideBySide
    from planner.answers.sweep import Sweep
    from planner.cost.run import Requirement
    from planner.plan_parts import ObjectiveName
    from planner.search.reporter import Reporter
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


class Shortfall:
    """A job for which no layout fits, or none meets deadline and budget, and the searches for what would help.

    asked: the constraints of the user, without the limits of the engine's programs.
    in_time: the objective whose limits are not met; None if the job lacks memory.
    missed: the requirements that are not met.
    """

    job: Job
    asked: Constraints
    in_time: InTime | None = None
    missed: tuple[Requirement, ...] = ()

    def remedies(self, reporter: Reporter | None = None) -> tuple[Remedy, ...]:
        """Changes with which the job fits, or meets its requirements, sorted by tokens per device, most first."""
        from planner.answers.remedies import remedies

        return remedies(self.job, self.asked, reporter, in_time=self.in_time, planned=plannable)

    def lifted_pins(self, reporter: Reporter | None = None) -> tuple[LiftedPin, ...]:
        """For each pin of the user, the result of a search without this pin."""
        from planner.answers.remedies import each_lifted, lifted_pins

        return lifted_pins(self.job, each_lifted(self.asked), reporter, in_time=self.in_time, planned=plannable)


def shortfall(found: Plan | Sweep | SideBySide, objective: ObjectiveName = "throughput") -> Shortfall | None:
    """What an answer lacks of what was asked for; None if a plan fits and meets the requirements of the objective.

    `planner plan` exits with 3 and says what would help if its answer has a shortfall. If a job fits on no cluster of a
    comparison, the shortfall is that of the cluster on which it fits most likely.
    """
    lacking = Shortfall()
    if isinstance(found, Plan):
        lacking.job, asked = job_of(found), constraints_of(found)
        missed = found.run.missed if found.fits and found.run else ()
        lacking.missed = tuple(each for each in LIMITS[objective] if each in missed)
        if found.fits and not lacking.missed:
            return None
    from planner.answers.remedies import InTime
    from planner.answers.sweep import Sweep

    if isinstance(found, Plan):
        lacking.in_time = InTime(objective, found.options.confidence or CONFIDENCE) if found.fits else None
    elif isinstance(found, Sweep):
        lacking.job, asked, objective = found.job, found.constraints, found.objective
        runs = [[each for each in LIMITS[objective] if each in found.run(point).missed] for point in found.front]
        if not all(runs):
            return None
        if runs:
            nearest = min(range(len(runs)), key=lambda at: len(runs[at]))
            lacking.missed, lacking.in_time = tuple(runs[nearest]), InTime(objective, found.confidence)
    else:
        lacks = [shortfall(each.plan, found.objective) for each in sorted(found.planned, key=_chance) if each.plan]
        return lacks[-1] if all(lacks) else None
    limits = plannable(lacking.job, replace(asked, forbidden=())).forbidden
    lacking.asked = replace(asked, forbidden=tuple(each for each in asked.forbidden if each not in limits))
    return lacking


def _chance(choice: Choice) -> tuple[bool, float, float]:
    """How near a choice comes to what was asked for."""
    plan = choice.plan
    chances = [each for each in (plan.deadline_chance, plan.budget_chance) if each is not None] if plan else []
    return choice.fits, min(chances, default=0.0), choice.chance_of_fitting or 0.0
