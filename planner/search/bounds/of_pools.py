"""Lower bounds of the step time of configurations on a mixed cluster; the counterpart of `of_steps`.

Let p_i be the least seconds of a layer on pool i. A stage there takes at least v p_i for its chunks and holds at most T
/ p_i layers in T seconds. If each pool i has c_i stages, and all stages together hold L layers, the slowest stage takes
at least

    T >= (L + h_j / p_j) / sum_i (c_i / p_i)

where h_j is the time of the head in pool j, the pool in which the model ends. Before stages are assigned to pools, the
sum uses the fastest pools with enough devices, and the head's term is the smallest of all pools. The bound of the step
has the same form as on one pool: (m - 1/v) * slowest + all work / v + the longest tail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.microbatch import num_microbatches
from planner.cost.schedule import steady_count, step_seconds
from planner.search.bounds.least_costs import least_costs
from planner.search.bounds.of_layers import LayerBounds, num_main_layers
from planner.search.bounds.of_memory import capacities_of_stages, held_in_time
from planner.search.bounds.of_steps import LONG, lower_bound_seconds, masks_of, single_stage_seconds
from planner.search.space.arrays import unrolled
from planner.search.space.configurations import expert_options
from planner.search.space.placements import (
    fastest_stages,
    orders_of,
    placement_codes,
    placements_of,
    room_in_pools,
    stage_counts,
)
from planner.search.space.policies import choices_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.numbers import Number, Rows
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.search.space.space import Space
    from planner.specs.job import Job

_ROUNDING: Final = 1 - 1e-12
"""Tolerance for rounding: a bound sums in another order than the prices do, so it is multiplied by this factor."""

_MOST_ROWS: Final = 20_000  # configurations whose stages are checked one by one in one block
_HALVINGS: Final = 5  # of the span between a bound and the cutoff


class PoolBounds:
    """The `LayerBounds` of every pool, and bounds from them for configurations whose stages have no pool yet."""

    def __init__(self, job: Job, partitions: DegreeArrays) -> None:
        self._job = job
        pairs = expert_options(job)
        self._of_pools = [LayerBounds(pool, partitions, pairs) for pool in job.pools]

    def partition_bound_seconds(self, partitions: DegreeArrays) -> NDArray[np.float64]:
        """`LayerBounds.partition_bound_seconds` for a mixed cluster, with the stages on the fastest pools.

        Source: derived here; tested to stay below the exact optimum.
        """
        if len(self._of_pools) == 1:
            return self._of_pools[0].partition_bound_seconds(partitions)
        each = np.stack([bounds.layer_seconds_of_sequence(partitions) for bounds in self._of_pools], axis=1)
        stages = fastest_stages(self._job, partitions, each)
        batch, layers = self._job.training.global_batch_size, self._job.model.num_layers
        return np.asarray(batch / partitions.dp * layers / (stages / each).sum(axis=1) * _ROUNDING)

    def timing_bound_seconds(self, degrees: DegreeArrays, *, any_experts: bool = False) -> NDArray[np.float64]:
        """`LayerBounds.timing_bound_seconds` for a mixed cluster, with the stages on the fastest pools.

        Source: derived here; tested to stay below the exact optimum.
        """
        if len(self._of_pools) == 1:
            return self._of_pools[0].timing_bound_seconds(degrees, any_experts=any_experts)
        prices = [bounds.layer_and_head_seconds(degrees, any_experts=any_experts)[1::2] for bounds in self._of_pools]
        layer, head = (np.stack(each, axis=1) for each in zip(*prices, strict=True))
        layer = np.where(room_in_pools(self._job, degrees) > 0, layer, np.inf)
        stages = fastest_stages(self._job, degrees, layer)
        costs = _PoolCosts(layer=layer, ends=head, tail=np.zeros_like(head), by_policy=layer[np.newaxis])
        return _step_seconds(self._job, degrees, costs, stages, last=None)

    def sharded_bound_seconds(
        self, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Lower bound of a step with experts and ZeRO stage known, for any number of replicas and any placement.

        Gain (`any-replicas`, medians of 3): DeepSeek-V3 1.68 -> 1.48 s on 11,000 devices, 6.29 -> 5.38 on 100,000.

        Source: `lower_bound_seconds` on one pool, `timing_bound_seconds` on several.
        """
        if len(self._of_pools) > 1:
            return self.timing_bound_seconds(degrees)
        (pool,) = self._job.pools
        return lower_bound_seconds(pool, degrees, policies, cutoff_seconds=cutoff_seconds, any_replicas=True)


def promising_placements(space: Space, degrees: DegreeArrays) -> DegreeArrays:
    """The configurations with their stages on the pools of highest peak FLOPs, in every order of these pools."""
    job = space.job
    peak = [1 / pool.cluster.device.peak[job.training.precision] for pool in job.pools]
    stages = fastest_stages(job, degrees, np.tile(peak, (len(degrees), 1)))
    rows, order = orders_of(stages)
    found = replace(degrees.take(rows), placement=placement_codes(job, order, stages[rows]))
    return found.take(space.has_pinned_pools(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolCosts:
    """Least prices of the stages of configurations on each pool, [n, pools].

    layer: seconds of one more layer.
    ends: further seconds of the stage that holds the model's end.
    tail: seconds of the longest tail, if it is on the pool.
    by_policy: seconds of one more layer of the main kinds, [policies, n, pools].
    """

    layer: NDArray[np.float64]
    ends: NDArray[np.float64]
    tail: NDArray[np.float64]
    by_policy: NDArray[np.float64]

    def take(self, rows: Rows) -> _PoolCosts:
        """The prices of these configurations."""
        return _PoolCosts(
            layer=self.layer[rows], ends=self.ends[rows], tail=self.tail[rows], by_policy=self.by_policy[:, rows]
        )


def _slowest_and_work(
    job: Job, degrees: DegreeArrays, costs: _PoolCosts, stages: NDArray[np.int64], last: NDArray[np.int64] | None
) -> tuple[Number, Number]:
    """Least seconds of one microbatch in the slowest stage, and in all stages together.

    last: the pool in which the model ends; None: any pool.
    """
    num_layers, v = job.model.num_layers, degrees.interleave
    used = stages > 0
    layer = np.where(used, costs.layer, np.inf)
    in_layers = costs.ends / costs.layer  # the time of the model's end, in layers
    if last is None:
        last_layers, alone, ends = (
            np.where(used, each, np.inf).min(axis=1)
            for each in (in_layers, v[:, np.newaxis] * costs.layer + costs.ends, costs.ends)
        )
    else:
        rows = np.arange(len(degrees))
        last_layers, ends = in_layers[rows, last], costs.ends[rows, last]
        alone = v * costs.layer[rows, last] + ends
    slowest = np.maximum((num_layers + last_layers) / (stages / layer).sum(axis=1), alone)
    own = v[:, np.newaxis] * stages * np.where(used, costs.layer, 0.0)
    work = own.sum(axis=1) + (num_layers - degrees.pp * v) * layer.min(axis=1) + ends
    return slowest, work


def _step_seconds(
    job: Job, degrees: DegreeArrays, costs: _PoolCosts, stages: NDArray[np.int64], last: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    slowest, work = _slowest_and_work(job, degrees, costs, stages, last)
    m, v = num_microbatches(job, degrees), degrees.interleave
    tail = np.where(stages > 0, costs.tail, np.inf).min(axis=1)
    return np.asarray(step_seconds(m, v, slowest, work, tail) * _ROUNDING)


def placed(
    space: Space, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: NDArray[np.float64]
) -> tuple[DegreeArrays, NDArray[np.float64]]:
    """Every placement that may stay within the cutoff of its configuration, and the bound of each placement.

    Source: derived here; tested to stay below the exact optimum.
    """
    job = space.job
    if not len(degrees):
        return degrees, np.zeros(0)
    if len(job.pools) == 1:
        return degrees, lower_bound_seconds(job.pools[0], degrees, policies, cutoff_seconds=cutoff_seconds)
    costs = _pool_costs(job, degrees, policies, cutoff_seconds)
    rows, stages = stage_counts(job, degrees)
    possible = np.isfinite(np.where(stages > 0, costs.layer[rows], 0.0)).all(axis=1)
    rows, stages = rows[possible], stages[possible]
    bounds = _step_seconds(job, degrees.take(rows), costs.take(rows), stages, None)
    near = bounds <= cutoff_seconds[rows]
    rows, stages = rows[near], stages[near]
    again, order = orders_of(stages)
    rows, stages = rows[again], stages[again]
    found = replace(degrees.take(rows), placement=placement_codes(job, order, stages))
    kept = np.flatnonzero(space.has_pinned_pools(found))
    found, rows, stages = found.take(kept), rows[kept], stages[kept]
    bounds = _step_seconds(job, found, costs.take(rows), stages, placements_of(job, found).last)
    kept = np.flatnonzero(bounds <= cutoff_seconds[rows])
    found, rows, bounds = found.take(kept), rows[kept], bounds[kept]
    bounds = _least_in_time(job, degrees, policies, costs, (found, rows, bounds), cutoff_seconds[rows])
    kept = np.flatnonzero(np.isfinite(bounds))
    return found.take(kept), bounds[kept]


def _pool_costs(
    job: Job, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: NDArray[np.float64]
) -> _PoolCosts:
    """Lower bounds of a stage's seconds on each pool; for a configuration of one stage, its exact seconds."""
    alone, piped = np.flatnonzero(degrees.pp == 1), np.flatnonzero(degrees.pp > 1)
    shape = (len(degrees), len(job.pools))
    layer, ends, tail = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    by_policy = np.full((len(choices_of(degrees, policies).policy), *shape), np.inf)
    for number, pool in enumerate(job.pools):
        if len(alone):
            step = single_stage_seconds(pool, degrees.take(alone), masks_of(policies, alone), any_replicas=False)
            # the only stage runs all layers m times, tail included
            layer[alone, number] = step / num_microbatches(job, degrees.take(alone)) / job.model.num_layers
        if len(piped):
            chosen, cutoff = masks_of(policies, piped), cutoff_seconds[piped]
            prices = least_costs(pool, degrees.take(piped), chosen, cutoff, any_replicas=False)
            layer[piped, number] = prices.layer.min(axis=(0, 1))
            ends[piped, number], tail[piped, number] = prices.ends, prices.tail
            by_policy[:, piped, number] = prices.main
    return _PoolCosts(layer=layer, ends=ends, tail=tail, by_policy=by_policy)


def _least_in_time(
    job: Job,
    degrees: DegreeArrays,
    policies: PolicyMasks,
    costs: _PoolCosts,
    near: tuple[DegreeArrays, NDArray[np.int64], NDArray[np.float64]],
    cutoff_seconds: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The bounds, raised to step times in which the stages cannot hold all layers; infinite where that is the cutoff.

    A step that takes T allows its slowest stage a time that grows with T. Within this time and within their memory the
    stages hold whole layers. If they cannot hold all layers, T is a lower bound. A few halvings between the bound and
    the cutoff find such a T, which need not be the greatest.

    Gain (`holds-in-time`), Llama-3-70B on three pools: over 20 -> 4.30 s; of the halvings 6.9 -> 3.5 s (busy machine).

    near: placed configurations, their positions in `degrees`, and their bounds. Configurations with one stage already
    have exact prices.
    """
    found, rows, bounds = near
    least, piped = bounds.copy(), np.flatnonzero(found.pp > 1)
    used, of_found = np.unique(rows, return_inverse=True)
    left, chosen = degrees.take(used), masks_of(policies, used)
    capacity = np.stack([capacities_of_stages(pool, left, chosen).layers for pool in job.pools])
    first = (np.cumsum(left.pp) - left.pp)[of_found]  # stage of each placement, on the last axis of `capacity`

    def hold_all(part: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether the stages can hold all layers if the slowest takes as long as a step of `seconds` allows."""
        x, own = found.take(part), costs.take(rows[part])
        place, m, v = placements_of(job, x), num_microbatches(job, x), x.interleave
        _, work = _slowest_and_work(job, x, own, place.stages, place.last)
        tail = np.where(place.stages > 0, own.tail, np.inf).min(axis=1)
        most = (seconds - (work / v + tail) * _ROUNDING) / np.maximum(steady_count(m, v), 1e-9)
        owner, index, _ = unrolled(x.pp)
        pool, stage = place.pool_of(owner, index), first[part][owner] + index
        spare = np.where(np.isfinite(most), most, LONG)[owner]
        spare = spare - np.where(index == x.pp[owner] - 1, own.ends[owner, pool], 0.0)
        held = held_in_time(spare, own.by_policy[:, owner, pool], capacity[pool, :, stage].T)
        return np.bincount(owner, weights=held, minlength=len(x)) >= num_main_layers(job) * (1 - 1e-9)

    for start in range(0, len(piped), _MOST_ROWS):
        part = piped[start : start + _MOST_ROWS]
        held = hold_all(part, cutoff_seconds[part])
        least[part[~held]] = np.inf
        part = part[held]
        low, high = bounds[part], np.minimum(cutoff_seconds[part], 2 * bounds[part])
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            held = hold_all(part, middle)
            low, high = np.where(held, low, middle), np.where(held, middle, high)
        least[part] = low
    return least
