"""Compare clusters and sizes: time and cost of a job on each, and the choices that no other choice beats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from planner.cost.run import REFERENCE_TOKENS, price_of
from planner.errors import InputError
from planner.sums import sum_of
from planner.units import UNITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from planner.cost.run import WholeRun
    from planner.plan import Plan
    from planner.plan_parts import ObjectiveName

Measure = Literal["usd", "kilowatt_hours", "device_hours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One cluster in one size.

    cluster: its name as the user gave it.
    hosts: the requested number; None if the cluster or --gpus sets it.
    why_not: the reason why no plan exists.
    on_front: whether the choice fits, meets the deadline and the budget if any choice does, and no other such choice
    beats it. A choice beats another if it is better in either time or the measure, and no worse in the remaining one.
    """

    cluster: str
    hosts: int | None = None
    plan: Plan | None = None
    why_not: str = ""
    on_front: bool = False

    @property
    def fits(self) -> bool:
        """Whether the choice has a plan and the plan fits."""
        return self.plan is not None and self.plan.fits is True

    @property
    def name(self) -> str:
        """The name in the cluster's document; without a plan, what the user gave."""
        return self.cluster if self.plan is None else self.plan.cluster.name

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
    def usd_with_idle(self) -> float | None:
        """Cost of the run if idle devices are paid for too; None without a plan, or where a device has no price."""
        plan, run = self.plan, self.run
        prices = [(price_of(pool, plan.training), pool.num_devices) for pool in plan.cluster.pools] if plan else []
        if run is None or any(price is None for price, _ in prices):
            return None
        return run.seconds / UNITS["seconds"]["h"] * sum_of((price or 0.0) * count for price, count in prices)

    @property
    def chance_of_fitting(self) -> float | None:
        """The plan's chance of fitting; None without a plan, or if headroom replaces the chance."""
        return getattr(self.plan, "chance_of_fitting", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Choices in the order in which the user named them.

    measure: what is compared in addition to time: money, if every choice that fits has a price; else energy, if every
    device states its power; else device hours.
    objective: of each plan.
    """

    choices: tuple[Choice, ...]
    measure: Measure
    objective: ObjectiveName = "throughput"

    @property
    def planned(self) -> tuple[Choice, ...]:
        """The choices that have a plan."""
        return tuple(each for each in self.choices if each.plan is not None)

    @property
    def front(self) -> tuple[Choice, ...]:
        """The choices that no other choice beats, the fastest first."""
        return tuple(sorted((each for each in self.choices if each.on_front), key=self.costs))

    def name_of(self, choice: Choice) -> str:
        """The name of a choice, with its hosts if other sizes of the cluster are compared too.

        Where two clusters have the same name, it is what the user gave.
        """
        alike = [each for each in self.choices if each.name == choice.name]
        name = choice.name if len({each.cluster for each in alike}) == 1 else choice.cluster
        several = sum(each.cluster == choice.cluster for each in self.choices) > 1
        return f"{name} x {choice.hosts}" if several and choice.hosts else name

    def costs(self, choice: Choice) -> tuple[float, float]:
        """Seconds of the run, and its money, energy or device hours (`measure`)."""
        run = choice.run
        assert run is not None, "a choice without a plan costs nothing"
        return run.seconds, float(getattr(run, self.measure) or 0.0)


def side_by_side(
    pairs: Sequence[tuple[str, int | None]],
    plan_on: Callable[[str, int | None], Plan],
    objective: ObjectiveName = "throughput",
) -> SideBySide:
    """Plan a job on each cluster in each size; a choice without a plan holds the reason.

    plan_on: plans the job on a cluster with the given number of hosts.

    Raises:
        InputError: the job cannot be planned on any cluster.
        EnvironmentProblem: a file cannot be read.
    """
    choices: list[Choice] = []
    errors: list[InputError] = []
    for cluster, hosts in pairs:
        try:
            choices.append(Choice(cluster=cluster, hosts=hosts, plan=plan_on(cluster, hosts)))
        except InputError as error:
            errors.append(error)
            choices.append(Choice(cluster=cluster, hosts=hosts, why_not=error.mistakes[0].message))
    if errors and len(errors) == len(choices):
        raise InputError(*dict.fromkeys(mistake for error in errors for mistake in error.mistakes))
    return replace(with_front(choices), objective=objective)


def with_front(choices: Iterable[Choice]) -> SideBySide:
    """The choices, with `on_front` set."""
    choices = tuple(choices)
    found = SideBySide(choices=choices, measure=_measure([each for each in choices if each.fits]))
    fitting = [each for each in choices if each.fits]
    met = [each for each in fitting if each.run and not each.run.missed]
    costs = {id(each): found.costs(each) for each in met or fitting}

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
