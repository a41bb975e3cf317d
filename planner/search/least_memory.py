"""The least memory per device with which a job can be trained at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.chance import memory_limit_bytes
from planner.cost.prices import stage_bytes
from planner.cost.stage import by_pool, stage_of
from planner.search.bounds.of_memory import least_shares
from planner.search.bounds.of_pools import placed
from planner.search.optimum.pricing import price_candidates
from planner.search.optimum.pruning import may_hold_all
from planner.search.space.placements import placements_of
from planner.search.space.refusals import legal_degrees
from planner.specs.job import each_pool

if TYPE_CHECKING:
    from planner.numbers import FloatArray
    from planner.search.optimum.candidate import Candidate
    from planner.search.space.configurations import DegreeArrays
    from planner.search.space.space import Space
    from planner.specs.job import Job

_MOST_AT_ONCE: Final = 1024  # configurations that are priced in one round
_NO_LIMIT: Final = 1e6  # multiple of a plan's memory limit: more than any stage needs, and finite


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPeak:
    """The least need of the fullest stage in bytes, and the memory limit of the device on which this stage runs."""

    num_bytes: float
    limit_bytes: float

    @property
    def share(self) -> float:
        """The need as a share of the limit; above 1 no layout fits."""
        return self.num_bytes / self.limit_bytes


def within_share(job: Job, share: float) -> Job:
    """The job with its memory limit multiplied by `share` in every pool."""
    return each_pool(job, lambda pool: replace(pool, memory_share=share * pool.memory_share))


def least_peak(space: Space) -> LeastPeak:
    """The least peak over all legal layouts: the peak of the fullest stage, as a share of its device's limit.

    Configurations are priced in the order of their lower bounds (`least_shares`), until a bound exceeds the best peak.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    blocks = list(legal_degrees(space, with_replicas=False, smallest=True))
    bounds = np.concatenate([least_shares(space.job, degrees) for degrees in blocks])
    block = np.repeat(np.arange(len(blocks)), [len(degrees) for degrees in blocks])
    row = np.concatenate([np.arange(len(degrees)) for degrees in blocks])
    order, first, size = np.argsort(bounds, kind="stable"), 0, 1
    best = LeastPeak(num_bytes=math.inf, limit_bytes=1.0)
    while first < len(order) and bounds[order[first]] < best.share:
        part = order[first : first + size]
        for number in np.unique(block[part]).tolist():
            here = part[(block[part] == number) & (bounds[part] < best.share)]
            if len(here):
                found = least_of(space, blocks[number].take(row[here]), best.share)
                best = min(best, found, key=lambda peak: peak.share)
        first, size = first + size, min(2 * size, _MOST_AT_ONCE)
    return best


def least_of(space: Space, some: DegreeArrays, most_share: float, *, most_placements: int | None = None) -> LeastPeak:
    """The least peak of some configurations over all placements; infinite where no peak is below `most_share`.

    most_placements: number of placements to price on several pools, evenly spaced.
    """
    job, policies = space.job, space.policies(some)
    within = space.of(within_share(job, min(most_share, _NO_LIMIT)))
    if len(job.pools) > 1:
        some, _ = placed(within, some, policies, np.full(len(some), np.inf))
        some = some.take(slice(None, None, 1 if most_placements is None else -(-len(some) // most_placements) or 1))
        policies = space.policies(some)
    best = LeastPeak(num_bytes=math.inf, limit_bytes=1.0)
    for row, candidate in enumerate(price_candidates(within, some, policies)):
        if not may_hold_all(candidate):  # most, with a tight memory limit
            continue
        degrees = some.take(row)
        limits = np.array([memory_limit_bytes(pool, degrees) for pool in job.pools])
        own = {"index": candidate.stage, "num_layers": candidate.layers, "policy": candidate.policy}
        shape = stage_of(job, **own, first=candidate.start, layout=degrees, last_chunk=candidate.last)
        pool = placements_of(job, some).pool_of(np.full_like(candidate.stage, row), candidate.stage)
        num_bytes = by_pool(job, pool, partial(stage_bytes, layout=degrees, stage=shape))
        shares = np.broadcast_to(num_bytes, pool.shape) / limits[pool]
        share = least_maximum(candidate, shares)
        if share < best.share:
            limit = float(limits[pool[np.flatnonzero(shares == share)[0]]])
            best = LeastPeak(num_bytes=share * limit, limit_bytes=limit)
    return best


def least_maximum(candidate: Candidate, values: FloatArray) -> float:
    """The least possible maximum over the stages, for any split of the layers, by a dynamic program over stages."""
    layers = candidate.num_layers
    least = np.full(layers + 1, np.inf)  # least value of the stages so far, by their layers
    least[0] = 0.0
    for stage, start in product(range(candidate.num_stages), range(candidate.pattern.num_states)):
        if start == 0:
            before, least = least, np.full(layers + 1, np.inf)
        here = (candidate.stage == stage) & (candidate.start == start)
        each = np.full(layers + 1, np.inf)  # least value of this stage, by its layers
        np.minimum.at(each, candidate.layers[here], values[here])
        stride = int(candidate.pattern.stride(start))
        for count in np.flatnonzero(np.isfinite(each)).tolist():
            from_, to = slice(start, layers + 1 - count, stride), slice(start + count, layers + 1, stride)
            np.minimum(least[to], np.maximum(before[from_], each[count]), out=least[to])
    return float(least[layers])
