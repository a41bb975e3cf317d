"""Placements on a mixed cluster: the order of the pools along the pipeline, and the number of stages in each pool.

A placement is the last key that the search fills in. One number encodes it, so that configurations stay arrays. The
number is 0 on a uniform cluster; otherwise it encodes the order of the pools and the number of stages in each pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.run import relative_prices
from planner.search.space.degree_rules import stages_in_pool

if TYPE_CHECKING:
    from planner.numbers import FloatArray, IntArray, Number
    from planner.search.space.configurations import DegreeArrays
    from planner.specs.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """The placements of many configurations.

    order: pools in the order of the pipeline, [n, pools]; pools without a stage are last.
    stages: number of stages in each pool, by pool, [n, pools].
    """

    order: IntArray
    stages: IntArray

    def pool_of(self, row: IntArray, stage: IntArray) -> IntArray:
        """The pool of a stage of the configuration `row`; arrays of one length."""
        ends = np.cumsum(np.take_along_axis(self.stages, self.order, axis=1), axis=1)
        position = sum(stage >= end[row] for end in ends.T)
        return np.asarray(self.order[row, position])

    @property
    def last(self) -> IntArray:
        """The pool in which the model ends, [n]."""
        used = (self.stages > 0).sum(axis=1)
        return np.asarray(np.take_along_axis(self.order, used[:, np.newaxis] - 1, axis=1)[:, 0])


def placements_of(job: Job, degrees: DegreeArrays) -> Placements:
    """The placements of the configurations, decoded; a uniform cluster is one pool with all stages."""
    if len(job.pools) == 1:
        return Placements(order=np.zeros((len(degrees), 1), dtype=np.int64), stages=degrees.pp[:, np.newaxis])
    base, num_pools = _base(job), len(job.pools)
    places = base ** np.arange(num_pools)
    code = degrees.placement[:, np.newaxis]
    return Placements(order=_orders(num_pools)[degrees.placement // base**num_pools], stages=code // places % base)


def pools_of_stages(job: Job, degrees: DegreeArrays) -> tuple[str, ...]:
    """The pool names of the stages of one configuration, whose degrees are integers; empty on a uniform cluster."""
    if len(job.pools) == 1:
        return ()
    one = degrees.at_once()
    found = placements_of(job, one).pool_of(np.zeros(degrees.pp, dtype=np.int64), np.arange(degrees.pp))
    return tuple(job.pools[pool].cluster.name for pool in found.tolist())


def roomiest_pools(job: Job, degrees: DegreeArrays) -> tuple[str, ...]:
    """Pool names for the stages of one configuration, starting with the pools with most memory per device."""
    if len(job.pools) == 1:
        return ()
    memory = np.array([[pool.whole_memory_bytes for pool in job.pools]])
    (stages,) = fastest_stages(job, degrees.at_once(), 1 / memory).tolist()
    order = np.argsort(-memory[0], kind="stable").tolist()
    return tuple(job.pools[pool].cluster.name for pool in order for _ in range(stages[pool]))


def most_layers_on(num_pools: int) -> int:
    """The most layers of a model whose placements on `num_pools` pools can be encoded as one number."""
    return int((2**63 / math.factorial(num_pools)) ** (1 / num_pools)) - 2  # one for the count 0, one for rounding


def placement_codes(job: Job, order_number: IntArray, stages: IntArray) -> IntArray:
    """The number that encodes each placement; the inverse of `placements_of`."""
    base, num_pools = _base(job), len(job.pools)
    assert len(_orders(num_pools)) * base**num_pools < 2**63, "too many pools for this many layers"
    return np.asarray(order_number * base**num_pools + (stages * base ** np.arange(num_pools)).sum(axis=1))


def _base(job: Job) -> int:
    return job.model.num_layers + 1


@cache
def _orders(num_pools: int) -> IntArray:
    """Every order of the pools, [orders, pools]."""
    return np.array(list(permutations(range(num_pools))))


@cache
def _orders_by_use(num_pools: int) -> dict[tuple[bool, ...], IntArray]:
    """For each set of used pools, the numbers of the distinct orders; unused pools are last, in ascending order."""
    found: dict[tuple[bool, ...], list[int]] = {}
    for number, order in enumerate(_orders(num_pools).tolist()):
        for count in range(1, num_pools + 1):
            if order[count:] == sorted(order[count:]):
                used = tuple(pool in order[:count] for pool in range(num_pools))
                found.setdefault(used, []).append(number)
    return {used: np.array(numbers) for used, numbers in found.items()}


def orders_of(stages: IntArray) -> tuple[IntArray, IntArray]:
    """Each row of `stages` repeated for every order of its used pools, and the number of the order."""
    used = stages > 0
    found_rows, found_numbers = [], []
    for pools in np.unique(used, axis=0):
        rows = np.flatnonzero((used == pools).all(axis=1))
        numbers = _orders_by_use(stages.shape[1])[tuple(pools.tolist())]
        found_rows.append(np.repeat(rows, len(numbers)))
        found_numbers.append(np.tile(numbers, len(rows)))
    if not found_rows:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.concatenate(found_rows), np.concatenate(found_numbers)


def stage_counts(job: Job, degrees: DegreeArrays) -> tuple[IntArray, IntArray]:
    """Every way to spread the stages of each configuration over pools with enough devices.

    Returns the configuration of each way, [ways], and its number of stages by pool, [ways, pools].
    """
    rooms = room_in_pools(job, degrees)
    cases, case_of = np.unique(np.column_stack([degrees.pp, rooms]), axis=0, return_inverse=True)
    found_rows, found_stages = [np.zeros(0, dtype=np.int64)], [np.zeros((0, len(job.pools)), dtype=np.int64)]
    for number, (pp, *room) in enumerate(cases.tolist()):
        ways = _ways(pp, tuple(room))
        rows = np.flatnonzero(case_of.ravel() == number)
        found_rows.append(np.repeat(rows, len(ways)))
        found_stages.append(np.tile(ways, (len(rows), 1)))
    return np.concatenate(found_rows), np.concatenate(found_stages)


@cache
def _ways(num_stages: int, room: tuple[int, ...]) -> IntArray:
    """Every way to spread `num_stages` over pools that have room for `room` stages each, [ways, pools]."""
    first, *rest = room
    if not rest:
        return np.full((int(num_stages <= first), 1), num_stages)
    parts = [np.zeros((0, len(room)), dtype=np.int64)]
    for here in range(max(0, num_stages - sum(rest)), min(first, num_stages) + 1):
        others = _ways(num_stages - here, tuple(rest))
        parts.append(np.column_stack([np.full(len(others), here), others]))
    return np.concatenate(parts)


def room_in_pools(job: Job, degrees: DegreeArrays) -> IntArray:
    """Number of stages for which each pool has enough devices, at most the configuration's stages, [n, pools]."""
    rooms = [np.minimum(stages_in_pool(pool, degrees), degrees.pp) for pool in job.pools]
    return np.stack(np.broadcast_arrays(*rooms), axis=1)


def fastest_stages(job: Job, degrees: DegreeArrays, layer_seconds: FloatArray) -> IntArray:
    """The distribution of stages over pools that computes most layers in a given time, [n, pools].

    layer_seconds: seconds of one layer on each pool, [n, pools].
    """
    rooms, left = room_in_pools(job, degrees), degrees.pp.copy()
    stages = np.zeros_like(rooms)
    order = np.argsort(layer_seconds, axis=1, kind="stable")
    rows = np.arange(len(degrees))
    for position in range(rooms.shape[1]):
        pool = order[:, position]
        stages[rows, pool] = np.minimum(rooms[rows, pool], left)
        left = left - stages[rows, pool]
    return stages


def billed(job: Job, degrees: DegreeArrays) -> Number:
    """Devices in use; each counts as its price divided by the price of the cheapest pool's device.

    Before stages have pools, the number is a lower bound. Shape [n], or one number for one configuration.
    """
    prices = np.array(relative_prices(job.cluster, job.training))
    if len(job.pools) == 1 or np.ptp(prices) == 0:
        return degrees.world_size
    each = degrees.at_once() if np.ndim(degrees.pp) == 0 else degrees
    stages = placements_of(job, each).stages
    cheapest = fastest_stages(job, each, np.tile(prices, (len(each), 1)))
    stages = np.where(stages.any(axis=1, keepdims=True), stages, cheapest)
    found = (stages * prices).sum(axis=1) * each.tp * each.cp * each.dp
    return found if np.ndim(degrees.pp) else float(found[0])
