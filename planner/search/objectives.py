"""Objectives: orders of layouts that bounds, solvers and certificate share."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from planner.cost.goodput import kept_share
from planner.cost.run import billed_devices, longest_step_seconds, most_device_seconds, price_of, relative_prices
from planner.errors import InputError
from planner.search.space.arrays import TIE
from planner.search.space.placements import billed

if TYPE_CHECKING:
    from planner.cost.run import Requirement
    from planner.layout import Degrees, Layout
    from planner.numbers import Number
    from planner.plan_parts import ObjectiveName
    from planner.search.space.configurations import DegreeArrays
    from planner.specs.job import Job

LIMITS: Final[dict[ObjectiveName, tuple[Requirement, ...]]] = {
    "throughput": ("budget",),
    "cost": ("deadline", "budget"),
    "gpus": ("deadline", "budget"),
    "memory": (),
}
"""The requirements of the training document that a plan by each objective has to meet."""
Rank: TypeAlias = tuple[float, float]
"""The sort key of a layout: the objective's number, then the step seconds; less is better."""
_NEVER: Final[Rank] = (math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An order of layouts by step time and devices in use.

    name: `throughput` orders by seconds. `cost` orders by device seconds, because a common price per device hour does
    not change this order. If the prices of pools differ, a device counts as its price divided by the cheapest pool's
    price. `gpus` orders by devices, then by seconds. `memory` orders by seconds, among the layouts that need as little
    memory as any layout (`least_memory`).
    longest_step_seconds, most_device_seconds: layouts with longer steps, or with more device seconds of a step, are not
    considered; a deadline and a budget set these limits.
    """

    name: ObjectiveName = "throughput"
    longest_step_seconds: float = math.inf
    most_device_seconds: float = math.inf

    def longest_seconds(self, num_devices: Number) -> Number:
        """The longest step that the limits allow on `num_devices` devices; broadcasts."""
        return np.minimum(self.longest_step_seconds, self.most_device_seconds / np.asarray(num_devices))

    def over(self, quantile: float) -> Objective:
        """The objective for layouts whose steps may take `quantile` times the forecast."""
        longest, most = self.longest_step_seconds / quantile, self.most_device_seconds / quantile
        return Objective(name=self.name, longest_step_seconds=longest, most_device_seconds=most)

    def relaxed(self) -> Objective:
        """The objective for a job that no layout meets: the cheapest in time, without a budget the fastest."""
        if self.most_device_seconds < math.inf:
            return Objective(name="cost", longest_step_seconds=self.longest_step_seconds)
        return Objective()

    @property
    def is_limited(self) -> bool:
        """Whether a deadline or a budget limits the step."""
        return min(self.longest_step_seconds, self.most_device_seconds) < math.inf

    @property
    def _is_billed(self) -> bool:
        """Whether devices count by their price; `gpus` needs their number."""
        return self.name == "cost" or (self.name != "gpus" and self.most_device_seconds < math.inf)

    def check(self, job: Job) -> None:
        """Check that either all pools of a mixed cluster have prices or none has.

        Raises:
            InputError: some have, and the objective is the cost.
        """
        free = [pool.cluster.name for pool in job.pools if price_of(pool.cluster, job.training) is None]
        if self.name == "cost" and 0 < len(free) < len(job.pools):
            hint = (
                f"--set '{free[0]}.price=2.50 USD/h per device', or --set 'training.price=2 USD/h per device' for all"
            )
            raise InputError(f"pool {free[0]} has no price, and others have", where="--objective cost", hint=hint)

    def rank(self, seconds: Number, num_devices: Number) -> tuple[Number, Number]:
        """The rank of steps of `seconds` on `num_devices` devices; broadcasts."""
        if self.name == "cost":
            return seconds * num_devices, seconds
        if self.name == "gpus":
            return num_devices + np.zeros(np.shape(seconds)), seconds
        return seconds, seconds

    def seconds_up_to(self, rank: Rank, num_devices: Number, share: float = 1.0) -> Number:
        """The longest step within the limits whose rank is no worse than `rank` multiplied by `share`; broadcasts."""
        first, seconds = rank
        if self.name == "cost":
            longest = first * share / np.asarray(num_devices)
        elif self.name == "gpus":
            behind = np.where(np.equal(num_devices, first), seconds * share, -math.inf)
            longest = np.where(np.less(num_devices, first), math.inf, behind)
        else:
            longest = np.full(np.shape(num_devices), first * share)
        return np.minimum(longest * (1 + TIE), self.longest_seconds(num_devices))

    def is_near(self, rank: Rank, best: Rank, share: float) -> bool:
        """Whether a layout is worse than the best by at most `share` of the objective's number."""
        first = rank[0] <= best[0] * (1 + share)
        return first and (self.name != "gpus" or rank[1] <= best[1] * (1 + share))

    def devices(self, job: Job, degrees: DegreeArrays) -> Number:
        """Devices in use, as this objective counts them, [n]; one number for one configuration."""
        return billed(job, degrees) if self._is_billed else degrees.world_size

    def devices_of(self, job: Job, layout: Layout) -> float:
        """Devices that a layout uses, as this objective counts them."""
        return billed_devices(job.cluster, job.training, layout) if self._is_billed else layout.world_size

    def weight(self, num_devices: float) -> float:
        """The factor of a layout's step time in the integer program."""
        return float(num_devices) if self.name == "cost" else 1.0


THROUGHPUT: Final = Objective()

WORTH_READING: Final = 0.1
"""A layout of another kind is listed as an alternative only if it is worse by at most this share.

The share is assumed: forecasts that differ by more are rarely in the wrong order.
"""


class Incumbents(ABC):
    """The best layouts so far; layouts with longer steps are ruled out.

    Unless a subclass says otherwise, step times alone are compared: a device counts as one, whatever it costs, and
    kinds do not matter.
    """

    @abstractmethod
    def cutoff_seconds(self, num_devices: Number) -> Number:
        """The longest step of a wanted layout on `num_devices` devices; broadcasts."""

    @abstractmethod
    def add(self, degrees: Degrees, num_devices: float, seconds: float) -> None:
        """Record a layout that was found."""

    def devices(self, job: Job, degrees: DegreeArrays) -> Number:  # noqa: ARG002 - wherever they are
        """Devices in use, as these incumbents count them, [n]; one number for one configuration."""
        return degrees.world_size

    def place_seconds(self, num_devices: Number, degrees: DegreeArrays) -> Number:  # noqa: ARG002 - of any kind
        """The longest step of a wanted layout that is no worse than the best of its kind so far, [n]."""
        return self.cutoff_seconds(num_devices)

    def order(self, seconds: Number, num_devices: Number) -> Number:
        """The sort key of the search: layouts of small values are searched first; broadcasts."""
        return seconds + 0 * num_devices


class BestKinds(Incumbents):
    """The best layouts of kinds (`kind_of`) by an objective, and layouts near the best.

    places: of kinds as good as the best of this many ways (`way_of`), the best layouts are wanted.
    within: the best layout of each kind that is worse than the best of all by at most this share is wanted, too.
    Layouts that are worse by more than `WORTH_READING` get no place.
    """

    def __init__(self, objective: Objective, places: int, *, within: float = 0.0) -> None:
        self.objective, self._places, self._within = objective, places, within
        self.first: Rank = _NEVER  # the best rank
        self._ranks: dict[tuple[int, ...], Rank] = {}  # of each kind
        self._ways: dict[tuple[int, ...], Rank] = {}  # of the best kind of each way
        self._last: Rank = _NEVER  # the rank of the last place

    def devices(self, job: Job, degrees: DegreeArrays) -> Number:
        """Devices in use, as the objective counts them."""
        return self.objective.devices(job, degrees)

    def cutoff_seconds(self, num_devices: Number) -> Number:
        """The longest step of a layout on `num_devices` devices that is still wanted."""
        places = self.objective.seconds_up_to(self._last, num_devices)
        if self.objective.name != "gpus":  # more devices are worth reading too
            places = np.minimum(places, self.objective.seconds_up_to(self.first, num_devices, 1 + WORTH_READING))
        return np.maximum(places, self.objective.seconds_up_to(self.first, num_devices, 1 + self._within))

    def place_seconds(self, num_devices: Number, degrees: DegreeArrays) -> Number:
        """The longest step of a wanted layout that is as good as the best layout of its kind, [n]."""
        kinds = np.stack(np.broadcast_arrays(*kind_of(degrees)), axis=-1).reshape(-1, 4)  # [n, 4]
        distinct, which = np.unique(kinds, axis=0, return_inverse=True)
        which = which.ravel()  # NumPy 2.0.0 has it in a column
        ranks = [self._ranks.get(tuple(kind), _NEVER) for kind in distinct.tolist()]
        own = [
            np.broadcast_to(self.objective.seconds_up_to(rank, num_devices), which.shape) for rank in ranks
        ]  # [kinds][n]
        return np.minimum(self.cutoff_seconds(num_devices), np.array(own)[which, np.arange(len(which))])

    def order(self, seconds: Number, num_devices: Number) -> Number:
        """The first number of the rank; broadcasts."""
        return self.objective.rank(seconds, num_devices)[0]

    def add(self, degrees: Degrees, num_devices: float, seconds: float) -> None:
        """Record a layout; only the best layout of each kind is kept."""
        kind, rank = kind_of(degrees), self.objective.rank(seconds, num_devices)
        if rank < self._ranks.get(kind, _NEVER):
            self._ranks[kind], self.first = rank, min(rank, self.first)
            self._ways[way_of(kind)] = min(rank, self._ways.get(way_of(kind), _NEVER))
            if len(self._ways) >= self._places:
                self._last = sorted(self._ways.values())[self._places - 1]


class AnyLayout(Incumbents):
    """Incumbents of a search for any layout: after the first layout, no other is wanted."""

    def __init__(self) -> None:
        self.found = False

    def cutoff_seconds(self, num_devices: Number) -> Number:
        """Infinite until a layout is found, then minus infinity, which no layout meets; broadcasts."""
        return np.full(np.shape(num_devices), -math.inf if self.found else math.inf)

    def add(self, degrees: Degrees, num_devices: float, seconds: float) -> None:  # noqa: ARG002 - of `Incumbents`
        """Record a layout that was found."""
        self.found = True


class Staircase(Incumbents):
    """The fastest layout for each number of devices, kept if it is faster than all layouts on fewer devices.

    Layouts on up to `num_first` devices compete with each other, as if they were all on `num_first` devices.
    """

    def __init__(self, num_first: int) -> None:
        self._num_first = num_first
        self._devices: list[float] = [0]  # of each step of the staircase, ascending
        self._seconds: list[float] = [math.inf]  # of each step of the staircase, descending

    def cutoff_seconds(self, num_devices: Number) -> Number:
        """The step time of the fastest layout with no more than `num_devices` devices; broadcasts."""
        place = np.searchsorted(self._devices, np.maximum(num_devices, self._num_first), side="right")
        return np.asarray(self._seconds)[place - 1]

    def add(self, degrees: Degrees, num_devices: float, seconds: float) -> None:  # noqa: ARG002 - of any partition
        """Record a layout, and drop slower layouts on at least as many devices."""
        num_devices = max(num_devices, self._num_first)
        if seconds >= self.cutoff_seconds(num_devices):
            return
        first = bisect.bisect_left(self._devices, num_devices)
        last = next((i for i in range(first, len(self._seconds)) if self._seconds[i] < seconds), len(self._seconds))
        self._devices[first:last], self._seconds[first:last] = [num_devices], [seconds]


def partition_of(degrees: Degrees) -> tuple[int, ...]:
    """The keys by which a reader tells plans apart: how the model is partitioned, but not how the parts are timed."""
    return degrees.tp, degrees.pp, degrees.dp, degrees.cp, degrees.ep, degrees.zero


def kind_of(degrees: Degrees) -> tuple[int, ...]:
    """The kind of a layout: its way to divide layers (tp, cp, ep), then pp; the batch and ZeRO do not matter."""
    return degrees.tp, degrees.cp, degrees.ep, degrees.pp


def way_of(kind: tuple[int, ...]) -> tuple[int, ...]:
    """The kind without pp: depths of a pipeline are many and nearly equal, so rows of other ways come first."""
    return kind[:-1]


def objective_of(job: Job, name: ObjectiveName) -> Objective:
    """The order of layouts that this job needs.

    A deadline does not change the fastest or smallest layout, nor a budget the smallest (`LIMITS`).
    """
    longest = longest_step_seconds(job.training) if "deadline" in LIMITS[name] else math.inf
    most = most_device_seconds(job.cluster, job.training) if "budget" in LIMITS[name] else math.inf
    if name == "gpus":  # devices of all pools count alike, so each counts as the dearest
        most /= max(relative_prices(job.cluster, job.training))
    if min(longest, most) == math.inf:
        return Objective(name=name)
    # failures of all devices are counted, so that the limit holds for layouts on any number of devices
    share = kept_share(job, [(pool.cluster, pool.cluster.num_devices) for pool in job.pools])
    return Objective(name=name, longest_step_seconds=longest * share, most_device_seconds=most * share)
