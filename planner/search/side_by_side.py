"""Clusters and sizes beside each other: what a job takes on each, and which of them no other beats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from planner.errors import InputError, NothingFitsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from planner.cost.run import WholeRun
    from planner.errors import PlannerError
    from planner.plan import Plan

REFERENCE_TOKENS: Final = 1e9
"""What a choice takes is told of so many tokens where the training has no budget."""

Measure = Literal["usd", "kilowatt_hours", "device_hours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One cluster in one size.

    cluster: as it was named. hosts: as they were asked for; None where the cluster or --gpus says. why_not: why there
    is no plan. on_front: it fits, and no other choice is better in time or in the measure and as good in the other one.
    """

    cluster: str
    hosts: int | None = None
    plan: Plan | None = None
    why_not: str = ""
    on_front: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits."""
        return self.plan is not None and self.plan.fits

    @property
    def run(self) -> WholeRun | None:
        """The token budget on this cluster, or `REFERENCE_TOKENS`; None without a plan."""
        if self.plan is None:
            return None
        training = self.plan.training
        if training.tokens is None:
            training = training.model_copy(update={"tokens": REFERENCE_TOKENS})
        return replace(self.plan, training=training).run

    @property
    def chance_of_fitting(self) -> float | None:
        """The plan's, where plans have one."""
        return getattr(self.plan, "chance_of_fitting", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Choices in the order in which they were named.

    measure: what counts beside time: money where every choice that fits has a price, else energy at rated power where
    every device has one, else device hours.
    """

    choices: tuple[Choice, ...]
    measure: Measure

    @property
    def planned(self) -> tuple[Choice, ...]:
        """Those that have a plan."""
        return tuple(each for each in self.choices if each.plan is not None)

    @property
    def front(self) -> tuple[Choice, ...]:
        """Those that no other beats, the quickest first."""
        return tuple(sorted((each for each in self.choices if each.on_front), key=self.costs))

    def costs(self, choice: Choice) -> tuple[float, float]:
        """Seconds of the run, and how much of the measure it takes."""
        run = choice.run
        assert run is not None, "a choice without a plan costs nothing"
        return run.seconds, float(getattr(run, self.measure) or 0.0)


def side_by_side(pairs: Sequence[tuple[str, int | None]], plan_on: Callable[[str, int | None], Plan]) -> SideBySide:
    """Plan a job on each cluster in each size; what cannot be planned says why in its place.

    plan_on: finds the plan of a cluster with so many hosts.

    Raises:
        NothingFitsError: it fits nowhere.
        InputError: it cannot be planned anywhere.
        EnvironmentProblem: a file cannot be read.
    """
    choices: list[Choice] = []
    errors: list[tuple[str, PlannerError]] = []
    for cluster, hosts in pairs:
        try:
            choices.append(Choice(cluster=cluster, hosts=hosts, plan=plan_on(cluster, hosts)))
        except (InputError, NothingFitsError) as error:
            errors.append((cluster, error))
            choices.append(Choice(cluster=cluster, hosts=hosts, why_not=error.mistakes[0].message))
    if errors and len(errors) == len(choices):
        raise _nowhere(errors)
    return with_front(choices)


def _nowhere(errors: Sequence[tuple[str, PlannerError]]) -> PlannerError:
    """The mistakes of all clusters as one error; what is said of all of them is said once."""
    if any(isinstance(error, NothingFitsError) for _, error in errors):
        messages = dict.fromkeys(f"{cluster}: {error.mistakes[0].message}" for cluster, error in errors)
        return NothingFitsError(*messages, hint="`planner plan MODEL CLUSTER` says what would fit")
    return InputError(*dict.fromkeys(mistake for _, error in errors for mistake in error.mistakes))


def with_front(choices: Iterable[Choice]) -> SideBySide:
    """The choices, with those marked that no other beats."""
    choices = tuple(choices)
    found = SideBySide(choices=choices, measure=_measure([each for each in choices if each.fits]))
    costs = {id(each): found.costs(each) for each in choices if each.fits}

    def is_beaten(choice: Choice) -> bool:
        own = costs[id(choice)]
        return any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in costs.values())

    marked = (replace(each, on_front=id(each) in costs and not is_beaten(each)) for each in choices)
    return replace(found, choices=tuple(marked))


def _measure(choices: Sequence[Choice]) -> Measure:
    runs = [run for each in choices if (run := each.run)]
    for name in ("usd", "kilowatt_hours"):
        if runs and all(getattr(run, name) is not None for run in runs):
            return name
    return "device_hours"
