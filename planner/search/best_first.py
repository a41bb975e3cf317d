"""Best-first search over outer configurations: lower bounds, then prices, then the dynamic program.

1. The search reads partitions of the devices in blocks, lowest bound first, and fills in each partition key by key. The
   search drops a configuration if its lower bound exceeds the cutoff, which is the step time of a layout tried before.
   The first layouts tried are even splits on one pool, and splits of configurations of many partitions: greedy ones,
   and of interleaved stages the dynamic program's.
2. The remaining configurations (`Found.near`) are priced, lowest bound first, until a bound exceeds the cutoff. The
   dynamic program finds the best layout of each configuration, which lowers the cutoff.

No lower bound exceeds the optimum of its configuration, so no unpriced configuration is among the best. The integer
program starts again from `Found.near` (`decision`); it reads no result of the second part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner.cost.schedule import EXECUTED
from planner.cost.stage import pattern_of
from planner.search.bounds.even_splits import even_split_seconds
from planner.search.bounds.of_layers import forget_shapes
from planner.search.bounds.of_memory import may_fit
from planner.search.bounds.of_pools import PoolBounds, placed, promising_placements
from planner.search.bounds.of_steps import least_seconds_of_any_policy, replicas_bound_seconds
from planner.search.found import Found, assigned_by
from planner.search.near import Bounded, Near, candidates_of
from planner.search.objectives import partition_of
from planner.search.optimum.dynamic_program import best_choice
from planner.search.optimum.executed_schedules import busy_seconds
from planner.search.optimum.pruning import greedy_choice, prune
from planner.search.reporter import Reporter
from planner.search.space.arrays import TIE
from planner.search.space.degree_rules import leading_layers, least_of_first_stage, searched_ends
from planner.search.space.refusals import no_candidate
from planner.search.time_limit import OutOfTime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.numbers import FloatArray, IntArray
    from planner.search.found import Assigned
    from planner.search.objectives import Incumbents
    from planner.search.space.configurations import DegreeArrays
    from planner.search.space.space import Space

_FIRST_PARTITIONS = 64  # partitions in the first block or part; each further one has `_GROWTH` times as many
_MOST_PARTITIONS = 4096
_MOST_TIMED = 4096  # partitions of a part, with microbatch and interleave
_GROWTH = 8  # with 2, the search for GPT-3 on 1,024 devices takes 1.3 times as long (4 alternating runs)
_EVEN_SPLITS = 64  # configurations of a part whose even split is tried
_BLOCK = 4096  # configurations that are bounded at once
_LOOKED_THROUGH = 1024  # configurations of a part that are considered for a greedy split
_BEST_SPLITS = 16  # of these, how many are tried with a greedy split, each of a different partition
_ROOM = 1.02  # on one pool, even splits are good where the cutoff is below this many times the bound
_FIRST_PRICED = 16  # configurations priced at first; each further round prices twice as many
_MOST_PRICED = 256


def best_first(
    space: Space,
    best: Incumbents,
    reporter: Reporter,
    *,
    until_interrupted: bool = False,
    has_incumbent: bool = False,
) -> Found:
    """Search all configurations, and price in full each configuration whose bound `best` does not rule out.

    has_incumbent: a good layout is known, so few configurations remain and the search uses its largest parts at once.
    until_interrupted: Ctrl-C ends only the search, not the planner, once a configuration has been found. `Found.bound`
    is then the lower bound of the layouts that were not searched.

    Raises:
        InputError: no legal configuration exists under the constraints.
    """
    forget_shapes()
    search = _Search(space, best, has_incumbent)
    found, waiting = search.found, list[Bounded]()
    try:
        waiting.extend(search.near_configurations())  # configurations found before an interruption are kept
        search.price(waiting, reporter)
    except KeyboardInterrupt as stop:
        if not until_interrupted or not waiting:
            raise
        found.is_out_of_time = isinstance(stop, OutOfTime)
        if not found.layouts:
            search.price(waiting, Reporter(), only_first=True)
        found.bound = search.least_bound()
    if not found.num_legal:
        raise no_candidate(space, found.refused)
    for reason, count in found.pruned.items():
        reporter.pruned(reason, count)
    return found


class _Search:
    """The state of one search: the layouts found so far, and the cutoff that they imply."""

    def __init__(self, space: Space, best: Incumbents, has_incumbent: bool) -> None:
        self._space, self._job, self._best = space, space.job, best
        self.found = Found(space)
        self._has_incumbent = has_incumbent
        self._num_partitions = _MOST_PARTITIONS if has_incumbent else _FIRST_PARTITIONS  # in the next block
        self._num_timed = _MOST_TIMED if has_incumbent else _FIRST_PARTITIONS  # in the next part
        self._room = _ROOM if len(self._job.pools) == 1 else 1.0
        executes = space.constraints.value_of("schedule") in EXECUTED
        self._most_priced = _FIRST_PRICED if executes else _MOST_PRICED
        self._first_priced = self._most_priced if has_incumbent else _FIRST_PRICED
        self._least = 0.0  # lower bound, in the objective's order, of configurations not searched yet

    def _cutoff(self, degrees: DegreeArrays, *, of_places: bool = False) -> FloatArray:
        """Step seconds above which a layout is not wanted, [n].

        of_places: return the limit for a place among the best kinds, instead of the limit for all wanted layouts.
        """
        devices = self._best.devices(self._job, degrees)
        seconds = self._best.place_seconds(devices, degrees) if of_places else self._best.cutoff_seconds(devices)
        return np.asarray(np.broadcast_to(seconds, len(degrees)) * (1 + TIE), dtype=np.float64)

    def _place(self, degrees: DegreeArrays, seconds: FloatArray) -> FloatArray:
        """The rank of steps of `seconds` in the objective's order, [n]."""
        place = self._best.order(seconds, self._best.devices(self._job, degrees))
        return np.asarray(np.broadcast_to(place, seconds.shape), dtype=np.float64)

    def _order(self, degrees: DegreeArrays, bounds: FloatArray) -> IntArray:
        """Positions of configurations, in the order in which the search reads the configurations."""
        return np.lexsort((bounds, self._place(degrees, bounds)))

    def _add(self, degrees: DegreeArrays, seconds: float) -> None:
        self._best.add(degrees, self._best.devices(self._job, degrees), seconds)
        self._has_incumbent = True

    def _drop(self, count: int) -> None:
        """Count configurations that a time bound ruled out; before a layout is found, only a deadline can do so."""
        if count:
            self.found.drop("time bound" if self._has_incumbent else "deadline", count)

    def near_configurations(self) -> Iterator[Bounded]:
        """Configurations whose bounds do not exceed the present cutoff, block by block."""
        space, found = self._space, self.found
        partitions = space.partitions(found.refused)
        found.num_cuts = len(partitions)
        if not len(partitions):
            return
        found.most_devices = int(partitions.world_size.max())
        lower = self._lower = PoolBounds(self._job, partitions)
        bounds = lower.partition_bound_seconds(partitions)
        self._least = float(self._place(partitions, bounds).min())
        order, first = self._order(partitions, bounds), 0
        while first < len(order):
            block = order[first : first + self._num_partitions]
            near = block[bounds[block] <= self._cutoff(partitions.take(block))]
            if len(near) < len(block) and not self._has_incumbent:
                self._drop(len(block) - len(near))
            found.num_cuts_pruned += len(block) - len(near)
            if len(near):
                for schedule in space.schedules:
                    timed = space.timings(partitions.take(near), schedule, found.refused)
                    if np.any(least_of_first_stage(self._job, timed) > timed.interleave) or (
                        schedule == "interleaved" and searched_ends(self._job) and pattern_of(self._job).leading
                    ):  # the embedding alone in the first chunk is left out (`_last_chunks`)
                        found.narrowed.add(leading_layers.name)
                    for part in self._by_bound(timed, lower):
                        yield from self._near_of_part(part, lower)
            first, self._num_partitions = first + len(block), min(_GROWTH * self._num_partitions, _MOST_PARTITIONS)

    def _by_bound(self, timed: DegreeArrays, lower: PoolBounds) -> Iterator[DegreeArrays]:
        """Parts of the timed partitions in the order of their bounds, without partitions beyond the cutoff."""
        if not len(timed):
            return
        bounds = lower.timing_bound_seconds(timed, any_experts=True)
        order, first = self._order(timed, bounds), 0
        while first < len(order):
            part = order[first : first + self._num_timed]
            near = part[self._keep(timed.take(part), bounds[part])]
            if len(near):
                yield timed.take(near)
                self._num_timed = min(_GROWTH * self._num_timed, _MOST_TIMED)
            first += len(part)

    def _keep(self, degrees: DegreeArrays, bounds: FloatArray, num_each: int = 1) -> IntArray:
        """Positions of the configurations that the cutoff does not rule out; the others count `num_each` times."""
        near = np.flatnonzero(bounds <= self._cutoff(degrees))
        self._drop(num_each * (len(degrees) - len(near)))
        return near

    def _near_of_part(self, timed: DegreeArrays, lower: PoolBounds) -> Iterator[Bounded]:
        """Configurations with experts, ZeRO stage and replicas filled in.

        Before each of these keys is filled in, bounds drop unwanted configurations.
        """
        space, refused = self._space, self.found.refused
        degrees = space.experts(timed, refused)
        degrees = degrees.take(self._keep(degrees, lower.timing_bound_seconds(degrees)))
        for offload in space.offloads:
            sharded = space.zero(degrees, offload, refused)
            yield from self._near_with(space.with_policies(self._wanted_with_any(sharded)))

    def _wanted_with_any(self, degrees: DegreeArrays) -> DegreeArrays:
        """The configurations that may still be wanted under at least one recompute policy."""
        policies = self._space.policies(degrees)
        one_each = not self._job.engine.pipeline.recompute_per_stage and degrees.schedule not in EXECUTED
        if len(policies) < 2 or len(self._job.pools) > 1 or not one_each:
            return degrees
        near = may_fit(self._job, degrees, list(policies))
        self.found.drop("memory", len(policies) * int(len(near) - near.sum()))
        degrees = degrees.take(near)
        if not self._has_incumbent:
            return degrees
        seconds = least_seconds_of_any_policy(self._job.pools[0], degrees, self._cutoff(degrees))
        return degrees.take(self._keep(degrees, seconds, len(policies)))

    def _near_with(self, degrees: DegreeArrays) -> Iterator[Bounded]:
        """Wanted configurations with the number of replicas filled in, and their lower bounds."""
        found, policies = self.found, self._space.policies(degrees)
        if not policies:
            found.drop("memory", len(degrees))
            return
        if degrees.schedule in EXECUTED:
            yield from self._near_of_executed(degrees)
            return
        fits = may_fit(self._job, degrees, list(policies))
        found.drop("memory", int(len(fits) - fits.sum()))
        for block in _blocks(degrees.take(fits)):
            for part in _blocks(self._replicated(self._space.replicas(self._sharded(block), found.refused))):
                bounded = self._complete(part)
                found.num_legal += len(bounded.degrees)
                if len(bounded.degrees):
                    near = np.flatnonzero(bounded.seconds * self._room <= self._cutoff(bounded.degrees))
                    self._try_splits(self._first_of_partitions(bounded.degrees.take(near), bounded.seconds[near]))
                    yield bounded

    def least_bound(self) -> float:
        """A lower bound of every layout, found or not searched yet, as a sort key of the objective."""
        found = self.found.layouts
        places = (self._best.order(x.seconds, self._best.devices(self._job, x.degrees)) for x in found)
        return min(self._least, *map(float, places), np.inf)

    def price(self, waiting: list[Bounded], reporter: Reporter, *, only_first: bool = False) -> None:
        """Price configurations, lowest bound first; skip configurations that the falling cutoff rules out meanwhile.

        only_first: stop at the first layout.
        """
        reporter.candidates(self.found.num_legal, sum(self.found.refused.values()))
        if not waiting:
            return
        near = self.found.near = Near(self._space, waiting)
        everything = near.degrees(slice(None))
        order, first, size = self._order(everything, near.seconds), 0, self._first_priced
        places, fastest = self._place(everything, near.seconds), np.inf
        if not only_first:
            self._least = float(places.min())
        while first < len(order) and not (only_first and self.found.layouts):
            part = order[first : first + size]
            wanted = part[near.seconds[part] <= self._cutoff(everything.take(part), of_places=True)]
            self.found.pruned["time bound"] += len(part) - len(wanted)
            for assigned in self._price_part(near, wanted) if len(wanted) else ():
                fastest = min(fastest, assigned.seconds)
            if np.isfinite(fastest):
                reporter.priced(self.found.num_priced, fastest)
            first, size = first + len(part), min(2 * size, self._most_priced)
            if not only_first:
                self._least = float(places[order[first:]].min(initial=np.inf))

    def _price_part(self, near: Near, part: IntArray) -> Iterator[Assigned]:
        """Price some configurations at once and yield the best assignment of each configuration still wanted."""
        cutoffs = self._cutoff(near.degrees(part), of_places=True)
        priced = near.candidates(part, cutoffs)
        self.found.num_priced += len(part)
        for position, whole, kept in zip(part.tolist(), priced, prune(priced, cutoffs), strict=True):
            if not kept.any():
                continue
            degrees, candidate = near.one(position), whole.keep(kept)
            longest = self._best.place_seconds(self._best.devices(self._job, degrees), degrees)
            if choice := best_choice(candidate, cutoff=float(np.max(longest)) * (1 + TIE)):
                assigned = assigned_by(degrees, candidate, choice)
                self.found.layouts.append(assigned)
                self._add(degrees, assigned.seconds)
                yield assigned

    def _sharded(self, degrees: DegreeArrays) -> DegreeArrays:
        """The configurations that may still be wanted with at least one number of replicas of the sharded group."""
        policies = self._space.policies(degrees)
        seconds = self._lower.sharded_bound_seconds(degrees, policies, self._cutoff(degrees))
        if len(self._job.pools) == 1:
            lowest = degrees.take(self._order(degrees, seconds)[:_EVEN_SPLITS])
            self._try_even(self._space.replicas(lowest, every=False))
        elif not self._has_incumbent:  # later splits are of the placements of least bounds
            self._try_splits(promising_placements(self._space, self._first_of_partitions(degrees, seconds)))
        return degrees.take(self._keep(degrees, seconds))

    def _replicated(self, degrees: DegreeArrays) -> DegreeArrays:
        """The configurations that may still be wanted with their number of replicas, before memory is looked at."""
        if len(self._job.pools) > 1 or not self._job.engine.can.replicates_shards:
            return degrees
        policies = self._space.policies(degrees)
        seconds = replicas_bound_seconds(self._job.pools[0], degrees, policies, self._cutoff(degrees))
        return degrees.take(self._keep(degrees, seconds))

    def _complete(self, degrees: DegreeArrays) -> Bounded:
        """Each placement of the configurations that the cutoff does not rule out, and its bound."""
        policies = self._space.policies(degrees)
        found, seconds = placed(self._space, degrees, policies, self._cutoff(degrees))
        near = self._keep(found, seconds)  # the pools of the stages decide the price of the devices
        return Bounded(degrees=found.take(near), seconds=seconds[near])

    def _near_of_executed(self, degrees: DegreeArrays) -> Iterator[Bounded]:
        """Configurations within the cutoff, for a schedule that is priced by execution: each has one assignment."""
        (pool,) = self._job.pools  # checked before: several pools have no such schedule
        degrees = self._space.replicas(degrees, self.found.refused)
        seconds = busy_seconds(pool, degrees, self._space.policies(degrees))
        fits = np.isfinite(seconds)
        self.found.drop("memory", int(len(fits) - fits.sum()))
        degrees, seconds = degrees.take(fits), seconds[fits]
        near = self._keep(degrees, seconds)
        self.found.num_legal += len(near)
        if len(near):
            yield Bounded(degrees=degrees.take(near), seconds=seconds[near])

    def _first_of_partitions(self, degrees: DegreeArrays, bounds: FloatArray) -> DegreeArrays:
        """The configuration with the lowest bound of each partition, lowest bound first."""
        order = self._order(degrees, bounds)[:_LOOKED_THROUGH]
        partitions = np.column_stack(np.broadcast_arrays(*partition_of(degrees.take(order))))
        firsts = np.sort(np.unique(partitions, axis=0, return_index=True)[1])
        return degrees.take(order[firsts[:_BEST_SPLITS]])

    def _try_even(self, degrees: DegreeArrays) -> None:
        """Lower the cutoff with even splits."""
        if self._space.constraints.lists or not len(degrees):
            return
        seconds = even_split_seconds(self._job.pools[0], degrees, self._space.policies(degrees))
        for position in np.flatnonzero(np.isfinite(seconds) & (seconds <= self._cutoff(degrees))).tolist():
            self._add(degrees.take(position), float(seconds[position]))

    def _try_splits(self, degrees: DegreeArrays) -> None:
        """Lower the cutoff with splits of the configurations that pins and rules allow.

        Greedy splits do not see what unequal chunks cost, so interleaved stages are then split by the dynamic program.

        Gain (`splits`, the dynamic program alone, busy machine): 21.2 -> 17.8 s for DeepSeek-V3 on 49,920 devices.
        """
        degrees = degrees.take(self._space.legal(degrees)) if len(degrees) else degrees
        if not len(degrees):
            return
        cutoff = self._cutoff(degrees)
        candidates = candidates_of(self._space, degrees, cutoff)
        for position, candidate in enumerate(candidates):
            choice = greedy_choice(candidate)
            if choice and choice.objective_seconds <= cutoff[position]:
                self._add(degrees.take(position), choice.objective_seconds)
        if degrees.schedule == "interleaved":
            for position, candidate in enumerate(candidates):
                one = degrees.take(position)
                cutoff = self._cutoff(one.at_once())
                (mask,) = prune([candidate], cutoff)
                choice = best_choice(candidate.keep(mask), cutoff=float(cutoff[0])) if mask.any() else None
                if choice:
                    self._add(one, choice.objective_seconds)


def _blocks(degrees: DegreeArrays) -> Iterator[DegreeArrays]:
    """The configurations in blocks, which limit the memory of their bounds and let the cutoff fall between them."""
    return (degrees.take(slice(first, first + _BLOCK)) for first in range(0, len(degrees), _BLOCK))
