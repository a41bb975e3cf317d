"""Cost of the whole training run: steps, time, device hours, money and energy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from planner.cost.flops import end_to_end_days, sc21_flops_per_step
from planner.cost.parameters import num_params
from planner.sums import sum_of
from planner.units import UNITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.layout import Layout
    from planner.specs.cluster import AnyCluster, ClusterSpec
    from planner.specs.model import ModelSpec
    from planner.specs.training import TrainingSpec

_HOUR = UNITS["seconds"]["h"]
REFERENCE_TOKENS: Final = 1e9
"""Number of tokens for the time and cost of a run, if the training has no token budget."""
Requirement: TypeAlias = Literal["deadline", "budget"]
"""A limit that the training document sets for the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A training run over its whole token budget. Devices that the layout leaves idle are not counted.

    usd: cost in US dollars; None without a price.
    kilowatt_hours: energy of the devices at their rated power, without hosts, network and cooling; None if the device
        file states no power.
    closed_form_days: 8TP/(nX) with the step's own FLOPs per second X, by the conventions of Narayanan et al. (SC 2021).
    meets_deadline, meets_budget: whether the run meets its deadline, and costs no more than its budget; None without.
    effective_share: share of the time spent in steps that are kept; 1 if failures are not counted.
    low_seconds, high_seconds: range of times in which 8 of 10 runs lie.
    deadline_chance, budget_chance: chance that the requirement is met; None if it is unknown.
    """

    tokens: float
    steps: int
    seconds: float
    device_hours: float
    usd: float | None
    kilowatt_hours: float | None
    closed_form_days: float
    deadline_seconds: float | None
    meets_deadline: bool | None
    budget_usd: float | None = None
    meets_budget: bool | None = None
    effective_share: float = 1.0
    low_seconds: float | None = None
    high_seconds: float | None = None
    deadline_chance: float | None = None
    budget_chance: float | None = None

    @property
    def days(self) -> float:
        """Length of the run in days."""
        return self.seconds / UNITS["seconds"]["d"]

    @property
    def missed(self) -> tuple[Requirement, ...]:
        """The requirements of the training document that the run does not meet."""
        met: dict[Requirement, bool | None] = {"deadline": self.meets_deadline, "budget": self.meets_budget}
        return tuple(name for name, is_met in met.items() if is_met is False)

    def judged(self, ends: tuple[float | None, float | None], confidence: float | None, **chances: Any) -> WholeRun:
        """The run with its range, and the requirements that it meets with a chance of at least `confidence`.

        ends: the range of step times. chances: `deadline_chance` and `budget_chance`. An unknown chance, or no
        confidence, leaves the forecast to decide.
        """
        low, high = (end and self.steps * end / self.effective_share for end in ends)
        found = replace(self, low_seconds=low, high_seconds=high, **chances)
        for name in ("deadline", "budget"):
            chance = chances[f"{name}_chance"]
            if chance is not None and confidence is not None:
                met: dict[str, Any] = {f"meets_{name}": chance >= confidence}
                found = replace(found, **met)
        return found


def num_steps(training: TrainingSpec) -> int | None:
    """Number of optimizer steps of the token budget (the last may be partial); None without a budget.

    Source: definition: tokens / (B s).
    """
    if training.tokens is None:
        return None
    return math.ceil(training.tokens / training.step_tokens)


def longest_step_seconds(training: TrainingSpec) -> float:
    """The longest step time at which the run still meets its deadline; infinite without a deadline or a token budget.

    Source: definition: deadline / steps.
    """
    steps = num_steps(training)
    return math.inf if steps is None or training.deadline is None else training.deadline / steps


def most_device_seconds(cluster: AnyCluster, training: TrainingSpec) -> float:
    """The most device seconds of a step, billed as `billed_devices` counts, at which the run stays within its budget.

    The result is infinite without a budget of money, a token budget or a price.

    Source: definition: budget / steps / price of the cheapest device.
    """
    steps, prices = num_steps(training), [price_of(pool, training) for pool in cluster.pools]
    if steps is None or training.budget is None or not all(prices):
        return math.inf
    return training.budget / steps / min(price or 0.0 for price in prices) * _HOUR


def price_of(cluster: ClusterSpec, training: TrainingSpec) -> float | None:
    """US dollars per hour of one device: the training document's price, else the cluster's.

    Source: the documents.
    """
    return training.price if training.price is not None else cluster.price


def devices_in_use(cluster: AnyCluster, layout: Layout) -> tuple[tuple[ClusterSpec, int], ...]:
    """The cluster, or each pool of a mixed cluster that the layout uses, with the number of its devices in use.

    Source: rank order of planner/layout.py.
    """
    if len(cluster.pools) == 1:
        return ((cluster.pools[0], layout.world_size),)
    each = layout.stride("pp")
    used = ((pool, layout.pools.count(pool.name) * each) for pool in cluster.pools)
    return tuple((pool, count) for pool, count in used if count)


def relative_prices(cluster: AnyCluster, training: TrainingSpec) -> tuple[float, ...]:
    """Each pool's price per device divided by the cheapest pool's price; 1 if no price is given.

    Source: the documents.
    """
    prices = [price_of(pool, training) or 1.0 for pool in cluster.pools]
    return tuple(price / min(prices) for price in prices)


def billed_devices(cluster: AnyCluster, training: TrainingSpec, layout: Layout) -> float:
    """Devices in use, weighted by price: a device counts as its price divided by the cheapest pool's price.

    Source: the documents.
    """
    shares = dict(zip((pool.name for pool in cluster.pools), relative_prices(cluster, training), strict=True))
    return sum_of(count * shares[pool.name] for pool, count in devices_in_use(cluster, layout))


def whole_run(
    model: ModelSpec,
    training: TrainingSpec,
    *,
    step_seconds: float,
    in_use: Sequence[tuple[ClusterSpec, int]],
    effective_share: float = 1.0,
) -> WholeRun | None:
    """The run over the whole token budget, with steps of `step_seconds`; None without a budget.

    effective_share: share of the time spent in steps that are kept (`planner.cost.goodput`).

    Source: definitions; closed form: Narayanan et al. (SC 2021), section 5.1, equation 4.
    """
    steps = num_steps(training)
    if steps is None or training.tokens is None:
        return None
    seconds = steps * step_seconds / effective_share
    num_devices = sum(count for _, count in in_use)
    prices = [(price_of(pool, training), seconds * count / _HOUR) for pool, count in in_use]
    powers = [(pool.device.power, seconds * count / UNITS["joules"]["kWh"]) for pool, count in in_use]
    flops = sc21_flops_per_step(model, training) / (step_seconds * num_devices)
    usd = _total(prices)
    return WholeRun(
        tokens=training.tokens,
        steps=steps,
        seconds=seconds,
        device_hours=sum_of(hours for _, hours in prices),
        usd=usd,
        kilowatt_hours=_total(powers),
        closed_form_days=end_to_end_days(training.tokens, num_params(model), num_devices, flops),
        deadline_seconds=training.deadline,
        meets_deadline=None if training.deadline is None else seconds <= training.deadline,
        budget_usd=training.budget,
        meets_budget=None if training.budget is None or usd is None else usd <= training.budget,
        effective_share=effective_share,
    )


def _total(rates: Sequence[tuple[float | None, float]]) -> float | None:
    """Sum of each rate times its amount; None if a rate is not known."""
    return None if any(rate is None for rate, _ in rates) else sum_of((rate or 0.0) * amount for rate, amount in rates)
