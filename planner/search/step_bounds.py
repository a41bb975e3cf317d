"""What no filling of a configuration can beat: bounds of its step time and of its memory, and a first good filling.

All of it is computed for arrays of configurations at once, before any of them is priced stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from planner.cost.compute import head_seconds
from planner.cost.prices import (
    StageParts,
    StagePrices,
    interleaving_terms,
    num_microbatches,
    stage_bytes,
    stage_fits,
    stage_parts,
    stage_prices,
)
from planner.cost.schedule import EXECUTED, in_flight_microbatches, pace_seconds
from planner.cost.shapes import LAYER_KEYS, spread
from planner.cost.stage import LayerKind, Stage, kinds_of_model, pattern_of, stage_of, timed_kinds
from planner.cost.traffic import StageWindow, data_parallel_seconds
from planner.layout import divisors
from planner.search.candidate import TIE
from planner.search.degrees import DegreeArrays, expert_options
from planner.specs.job import pools_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.search.degrees import PolicyMasks
    from planner.specs.job import AnyJob, Job

__all__ = [
    "EvenSplit",
    "FloorPrices",
    "LayerFloors",
    "Rooms",
    "always_fits",
    "can_interleave",
    "even_split_seconds",
    "even_splits",
    "floor_prices",
    "held_in_time",
    "hides_exchanges",
    "layer_loads",
    "least_stage_bytes",
    "lower_bound_seconds",
    "may_fit",
    "most_layers",
    "num_main_layers",
    "of_smallest_microbatches",
    "rooms_of_stages",
    "single_stage_seconds",
]

_LONG = 1e30  # seconds; longer than anything, and finite
_INSIDE = -1  # position of a stage that is neither the first nor the last of any pipeline


def _kinds(job: AnyJob) -> tuple[LayerKind, ...]:
    """The kinds of layers; those of what more layers have, experts or not, first, and of these those without a window.

    The others with as many parameters as the first are next.
    """
    kinds = kinds_of_model(job)
    with_experts = sum(kind.number for kind in kinds if kind.has_experts)
    main = 2 * with_experts >= job.model.num_layers
    return tuple(sorted(kinds, key=lambda kind: (kind.has_experts != main, kind.is_local)))


def _layer_floors(job: Job, degrees: DegreeArrays, parts: StageParts) -> list[Any]:
    """Least seconds of one layer of each kind for one microbatch.

    Computation and tensor and expert parallel communication of a layer that recomputes nothing; broadcasts.
    """
    floors = []
    for has_experts, is_local, _ in _kinds(job):
        layer = parts.layers[has_experts, is_local]
        shows = has_experts and not hides_exchanges(job, degrees)
        exchange = 2.0 * layer.ep if shows else 0.0
        felt = sum(layer.tp) - sum(layer.tp_hidden)
        floors.append(layer.passes.total + felt + exchange)
    return floors


def _layer_floor(job: Job, degrees: DegreeArrays, parts: StageParts) -> tuple[Any, Any]:
    """Least seconds of one layer for one microbatch: on average over the model's layers, and of its fastest kind."""
    mean: Any = 0.0
    fastest: Any = np.inf
    for kind, seconds in zip(_kinds(job), _layer_floors(job, degrees, parts), strict=True):
        mean, fastest = mean + kind.number / job.model.num_layers * seconds, np.minimum(fastest, seconds)
    return mean, fastest


_LOADS_PER_LAYER = 1000


def layer_loads(job: Job, degrees: DegreeArrays) -> dict[LayerKind, NDArray[np.int64]]:
    """How much more than one of the fastest kind a layer of each kind takes, in whole numbers, [n]; 1 of one kind."""
    kinds = _kinds(job)
    if len(kinds) == 1:
        return {kinds[0]: np.ones(len(degrees), dtype=np.int64)}
    floors = np.stack(
        [np.broadcast_to(each, (len(degrees),)) for each in _layer_floors(job, degrees, stage_parts(job, degrees))]
    )
    loads = np.rint(_LOADS_PER_LAYER * floors / floors.min(axis=0)).astype(np.int64)
    return dict(zip(kinds, loads, strict=True))


class LayerFloors:
    """Least seconds of a layer and of the head for every tp, cp, microbatch and degrees of experts, priced once.

    Arrays are [cuts, microbatches, experts]: what differs in (tp, sp, cp), each divisor of the batch, and each pair
    (ep, etp).
    """

    def __init__(self, job: Job, cuts: DegreeArrays, pairs: Sequence[tuple[int, int]] | None = None) -> None:
        """Price the cuts; `pairs` of (ep, etp) are those of the job unless they are given."""
        self._job = job
        distinct, _ = cuts.distinct("tp", "sp", "cp")
        self._cuts, order = np.unique(_code(distinct), return_index=True)
        self._sizes = np.array(divisors(job.training.global_batch_size))
        pairs = sorted(pairs or expert_options(job))
        self._pairs = np.array([ep * _PLACE + etp for ep, etp in pairs])
        x = distinct.take(order).columns().columns()
        x = replace(x, mbs=self._sizes[:, np.newaxis])
        x = replace(x, ep=np.array([ep for ep, _ in pairs]), etp=np.array([etp for _, etp in pairs]))
        shape = (len(order), len(self._sizes), len(pairs))
        self._mean, self._fastest = (np.broadcast_to(each, shape) for each in _layer_floor(job, x, stage_parts(job, x)))
        heads = (1 + job.model.mtp_layers) * head_seconds(job, x).total
        self._head = np.broadcast_to(heads, shape)[:, :, 0]

    def cut_bound_seconds(self, cuts: DegreeArrays) -> NDArray[np.float64]:
        """A step of these cuts takes at least this long, whatever microbatch, experts' degrees and the rest are.

        The slowest stage does at least its share of all layers of every sequence: T >= B / dp * L / pp * the least
        seconds of a layer and sequence over all microbatch sizes.

        Source: derived here; tested to stay below the exact optimum.
        """
        batch, layers = self._job.training.global_batch_size, self._job.model.num_layers
        each = (self._mean.min(axis=2) / self._sizes).min(axis=1)[self._cut_of(cuts)]
        return np.asarray(batch / cuts.dp * (layers / cuts.pp) * each)

    def timing_bound_seconds(self, degrees: DegreeArrays, *, any_experts: bool = False) -> NDArray[np.float64]:
        """The same with microbatch size and interleave known: T >= (m - 1/v) * slowest + all work / v.

        The slowest of S stages takes at least the mean of all work, and ceil(L / S) layers, and what the last
        stage needs for one layer in each chunk and the head. `any_experts`: whatever the degrees of experts are.

        Source: derived here; tested to stay below the exact optimum.
        """
        mean, fastest, head = self.layer_and_head_seconds(degrees, any_experts=any_experts)
        layers = self._job.model.num_layers
        m, v = num_microbatches(self._job, degrees), degrees.interleave
        work = layers * mean + head
        slowest = np.maximum(work / degrees.pp, np.ceil(layers / degrees.pp) * fastest)
        if degrees.schedule in EXECUTED:  # whose bubble has no such form, and whose head may be on any stage
            return np.asarray(m * np.maximum(work / degrees.pp, np.ceil(layers / degrees.pp) * fastest))
        slowest = np.maximum(slowest, v * fastest + head)
        return np.asarray((m - 1 / v) * slowest + work / v)

    def layer_and_head_seconds(self, degrees: DegreeArrays, *, any_experts: bool = False) -> tuple[Any, Any, Any]:
        """Least seconds of one microbatch: of a mean layer, of a layer of the fastest kind, and of the head."""
        cut, size = self._cut_of(degrees), np.searchsorted(self._sizes, degrees.mbs)
        head = self._head[cut, size]
        if any_experts:
            return self._mean.min(axis=2)[cut, size], self._fastest.min(axis=2)[cut, size], head
        pair = np.searchsorted(self._pairs, degrees.ep * _PLACE + degrees.etp)
        return self._mean[cut, size, pair], self._fastest[cut, size, pair], head

    def layer_seconds_of_sequence(self, cuts: DegreeArrays) -> NDArray[np.float64]:
        """Least seconds of a layer of the fastest kind for one sequence, whatever the microbatch size is."""
        return np.asarray((self._fastest.min(axis=2) / self._sizes).min(axis=1)[self._cut_of(cuts)])

    def _cut_of(self, degrees: DegreeArrays) -> NDArray[np.int64]:
        return np.asarray(np.searchsorted(self._cuts, _code(degrees)))


_PLACE = 1 << 24  # more than any degree


def _code(degrees: DegreeArrays) -> Any:
    """One number for each (tp, sp, cp)."""
    return (degrees.tp * 2 + degrees.sp) * _PLACE + degrees.cp


class _LayerShapes(NamedTuple):
    """The different layer shapes of configurations, which of them each has, and what stages of them consist of."""

    degrees: DegreeArrays
    position: NDArray[np.int64]
    parts: StageParts


def _layer_shapes(job: Job, degrees: DegreeArrays) -> _LayerShapes:
    distinct, position = degrees.distinct(*LAYER_KEYS)
    return _LayerShapes(distinct, position, stage_parts(job, distinct))


def most_layers(
    job: Job, degrees: DegreeArrays, cutoff_seconds: Any, shapes: _LayerShapes | None = None
) -> NDArray[np.int64]:
    """Layers that no stage exceeds: the other stages need theirs, and the step must stay within the cutoff.

    So many layers in a row have at least so many whole periods of the pattern, less one for each chunk but the first.
    shapes: those of the configurations, where they are priced already.
    """
    v, layers = degrees.interleave, job.model.num_layers
    most = layers - v * (degrees.pp - 1)
    if np.any(np.isfinite(cutoff_seconds)):
        shapes = shapes or _layer_shapes(job, degrees)
        distinct, position = shapes.degrees, shapes.position
        of_kinds = zip(_kinds(job), _layer_floors(job, distinct, shapes.parts), strict=True)
        floors = {kind[:2]: floor for kind, floor in of_kinds}
        steady = np.maximum(num_microbatches(job, degrees) - 1 / v, 1e-9)
        slowest = np.maximum(cutoff_seconds, 0.0) / steady * (1 + 1e-9)
        each = np.broadcast_to(np.minimum.reduce(list(floors.values())), (len(distinct),))[position]
        most = np.minimum(most, np.floor(slowest / each))
        pattern = pattern_of(job)
        if pattern.period > 1:
            one = stage_of(job, index=_INSIDE, num_layers=pattern.period, policy=0, first=pattern.leading)
            whole = sum(number * floors[kind] for kind, number in timed_kinds(job, distinct, one))
            periods = np.floor(slowest / np.broadcast_to(whole, (len(distinct),))[position])
            most = np.minimum(most, pattern.leading + pattern.period * (periods + v) - v)
    return np.asarray(most, dtype=np.int64)


def lower_bound_seconds(
    job: Job,
    degrees: DegreeArrays,
    policies: PolicyMasks,
    *,
    cutoff_seconds: Any = np.inf,
    any_replicas: bool = False,
) -> NDArray[np.float64]:
    """A step of these configurations takes at least this long, however layers and recompute are chosen.

    any_replicas: and with any number of replicas of the sharded group, which is 1 here: more of them need more memory
    and more of the optimizer's work; traffic between data-parallel ranks is left out.

    A stage with k layers takes at least k rho + send, rho being the price of a layer inside a stage of the most
    layers (`floor_prices`). Summed over the stages and with what the last stage has besides, that is all work;
    the slowest of S stages takes the mean of it, and ceil(L / S) layers, and one layer a chunk and the head. Then
    T >= (m - 1/v) * slowest + all work / v + the tail of a stage of ceil(L / S) layers. Configurations that may
    stay within the cutoff by that are bounded again with the recompute that their memory forces on them.

    Source: derived here; tested to stay below the exact optimum.
    """
    if not len(degrees):
        return np.zeros(0)
    bounds = np.full(len(degrees), np.inf)
    alone, piped = np.flatnonzero(degrees.pp == 1), np.flatnonzero(degrees.pp > 1)
    if len(alone):
        bounds[alone] = single_stage_seconds(job, degrees.take(alone), _of(policies, alone), any_replicas)
    if len(piped):
        left = degrees.take(piped)
        cutoff = np.broadcast_to(cutoff_seconds, (len(degrees),))
        floor = floor_prices(job, left, _of(policies, piped), cutoff[piped], any_replicas)
        bounds[piped] = _step_floor(job, left, floor, 0.0)
        near = bounds[piped] <= cutoff[piped]
        piped = piped[near]
        chosen = _of(policies, piped)
        bounds[piped] = _bound_by_memory(job, degrees.take(piped), floor.take(near), chosen, cutoff[piped])
    return bounds


def _of(policies: PolicyMasks, index: Any) -> PolicyMasks:
    return {policy: mask[index] for policy, mask in policies.items()}


def single_stage_seconds(
    job: Job, degrees: DegreeArrays, policies: PolicyMasks, any_replicas: bool
) -> NDArray[np.float64]:
    """The exact step time of configurations without a pipeline, whose stage has all layers."""
    choice = np.array(list(policies))[:, np.newaxis]
    stage = stage_of(job, index=np.zeros_like(degrees.pp), num_layers=job.model.num_layers, policy=choice)
    prices = stage_prices(job, degrees, stage)
    seconds = num_microbatches(job, degrees) * prices.microbatch_seconds + prices.tail_seconds
    if any_replicas:
        traffic = num_microbatches(job, degrees) * prices.dp_exposed_each + prices.dp_exposed_once
        seconds = seconds - traffic * (1 + 1e-9)
    fits = stage_fits(job, degrees, stage) & np.stack(list(policies.values()))
    return np.asarray(np.where(fits, seconds, np.inf).min(axis=0))


def _bound_by_memory(
    job: Job, degrees: DegreeArrays, floor: FloorPrices, policies: PolicyMasks, cutoff_seconds: Any
) -> NDArray[np.float64]:
    """The bound with what memory lets each stage hold, infinite where that is more than the cutoff for sure."""
    rooms = rooms_of_stages(job, degrees, policies)
    forced = _forced_seconds(job, degrees, floor, rooms)
    bounds = _step_floor(job, degrees, floor, forced)
    steady = num_microbatches(job, degrees) - 1 / degrees.interleave
    possible = np.isfinite(bounds)
    slowest = np.where(possible, _slowest_floor(job, degrees, floor, forced), 0.0)
    rest = np.where(possible, bounds, 0.0) - steady * slowest
    most = (cutoff_seconds - rest) / np.maximum(steady, 1e-9)
    held = _holds_in_time(job, degrees, floor, rooms, np.where(np.isfinite(most), most, _LONG))
    return np.where(held, bounds, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorPrices:
    """Least prices of the stages of configurations; of kinds and policies by the leading axes.

    layer: [kinds, policies, n] seconds of one more layer, infinite where a policy is not allowed. num_main: kinds that
    come first and hold as many parameters as each other. send: [n] of each stage. ends: [n] of the last stage besides
    its layers. tail: [n] of the longest tail.
    """

    layer: Any
    num_main: int
    send: Any
    ends: Any
    tail: Any

    @property
    def main(self) -> Any:
        """Seconds of one more layer of the fastest of the main kinds, [policies, n]."""
        return self.layer[: self.num_main].min(axis=0)

    def take(self, index: Any) -> FloorPrices:
        """The prices of these configurations."""
        return FloorPrices(
            layer=self.layer[:, :, index],
            num_main=self.num_main,
            send=self.send[index],
            ends=self.ends[index],
            tail=self.tail[index],
        )


def floor_prices(
    job: Job, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: Any, any_replicas: bool
) -> FloorPrices:
    """Least prices of a layer, from stages of the most layers: launches and latencies are spread over most there.

    The part of a data-parallel collective that is felt grows less than proportionally with the layers, so that its
    price for each of the most layers is a lower bound too. Where a stage may hold layers of two kinds, whose
    computation hides each other's traffic, that part is left out of them; `_transfer_floor` bounds it once a step.
    """
    main, n, shapes = _kinds(job)[0], len(degrees), _layer_shapes(job, degrees)
    most = np.maximum(most_layers(job, degrees, cutoff_seconds, shapes), 1)
    policy = np.array(list(policies))[:, np.newaxis]
    stage = _stage_of_kind(main, index=_INSIDE, num_layers=most, policy=policy)
    prices = stage_prices(job, degrees, stage, spread(shapes.parts, shapes.position))
    send = prices.pp_comm - prices.pp_hidden
    each, once = prices.microbatch_seconds - send, prices.tail_seconds
    others, ends = _small_prices(job, shapes, policies)
    if any_replicas or len(others):
        each = each - prices.dp_exposed_each
    if len(others):
        each = each - prices.host_exposed_each
    if any_replicas:
        once = once - prices.dp_exposed_once
    if _takes_turns(job):
        once = prices.optimizer
    shape = (len(policies), n)
    tail = _tail_floor(job, degrees, np.broadcast_to(once, shape), most)
    if not any_replicas:
        counts = np.array([kind.number for kind in _kinds(job)[1:]])[:, np.newaxis, np.newaxis]
        window = np.broadcast_to(_in_proportion(prices) + (counts * others).sum(axis=0), shape).max(axis=0)
        update = np.broadcast_to(prices.optimizer, shape).min(axis=0)
        tail = np.maximum(tail, _transfer_floor(job, degrees, update, window, most))
    layer = np.concatenate([np.broadcast_to(each, shape)[np.newaxis] / most, others])
    return FloorPrices(
        layer=np.where(np.stack(list(policies.values())), layer, np.inf),
        num_main=sum(kind.has_experts == main.has_experts for kind in _kinds(job)),
        send=np.broadcast_to(send, (n,)),
        ends=ends,
        tail=tail,
    )


def _small_prices(
    job: Job, shapes: _LayerShapes, policies: PolicyMasks
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of a layer of the other kinds, [kinds - 1, policies, n], and of the last stage besides its layers, [n].

    Only what is in proportion to the layers, which few of the degrees decide.
    """
    distinct = shapes.degrees.having("pp", np.full(len(shapes.degrees), 2))
    main, *others = _kinds(job)
    rows = [
        *((index, 0, main.has_experts, main.is_local) for index in (_INSIDE, 1)),
        *((_INSIDE, policy, kind.has_experts, kind.is_local) for kind in others for policy in policies),
    ]
    index, policy, *kind = (np.array(column)[:, np.newaxis] for column in zip(*rows, strict=True))
    prices = stage_prices(job, distinct, _stage_of_kind(kind, index=index, num_layers=1, policy=policy), shapes.parts)
    seconds = np.broadcast_to(_in_proportion(prices), (len(rows), len(distinct)))[:, shapes.position]
    return seconds[2:].reshape(len(others), len(policies), len(shapes.position)), seconds[1] - seconds[0]


def _stage_of_kind(kind: Sequence[Any], *, index: Any, num_layers: Any, policy: Any) -> Stage:
    """A stage of layers of one kind only, given as whether they have experts and a window."""
    experts, local = (np.multiply(num_layers, each) for each in kind[:2])
    return Stage(
        index=index,
        num_layers=num_layers,
        policy=policy,
        num_expert_layers=experts,
        num_local_layers=local,
        num_local_expert_layers=np.multiply(experts, kind[1]),
    )


def _tail_floor(
    job: Job, degrees: DegreeArrays, tail_seconds: NDArray[np.float64], most: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Least seconds of the longest tail, from the tails of a stage of the most layers of the first kind.

    That is the slowest of the main kinds, whose computation hides most. Some stage has main kinds only and at least q
    layers: all stages but one that has leading layers too, where there are any, and those before it, which have
    leading layers alone. Where dense layers and those with experts take turns, others are beside the q layers, and
    `tail_seconds` is what more layers only add to, the optimizer's.
    """
    others: Any = degrees.pp
    rest: Any = num_main_layers(job)
    if rest < job.model.num_layers and not _takes_turns(job):
        rest, others = rest - most, np.maximum(others - 1, 1)
    layers = np.maximum(np.ceil(rest / others), 0)
    return np.asarray(layers / most * tail_seconds.min(axis=0))


def _transfer_floor(
    job: Job, degrees: DegreeArrays, optimizer_seconds: Any, window_seconds: Any, most: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Least seconds of the longest tail, from what the stage with most layers of the main kinds has to move.

    It has q of them or more, q = ceil(L / S), and other layers only add to what it moves and updates. All of it but
    what its layers can hide is felt, and at least one part of as many as it has layers.

    window_seconds: [n], no stage hides more. optimizer_seconds: [n], of a stage of the most layers.

    Source: derived here; tested against all ways to cut small models.
    """
    layers = np.ceil(num_main_layers(job) / degrees.pp)
    stage = _stage_of_kind(_kinds(job)[0], index=_INSIDE, num_layers=layers, policy=0)
    moved = data_parallel_seconds(job, degrees, stage, StageWindow(forward=0.0, backward=0.0)).busy_per_step
    hidden = window_seconds if job.engine.overlaps_data_parallel else 0.0
    updated = np.minimum(layers / most, 1.0) * optimizer_seconds
    return np.asarray(updated + np.maximum(moved / np.maximum(layers, most), moved - hidden))


def _takes_turns(job: AnyJob) -> bool:
    """Whether dense layers and those with experts alternate behind the leading ones."""
    return job.model.moe is not None and job.model.moe.layer_frequency > 1


def _in_proportion(prices: StagePrices) -> Any:
    """What grows in proportion to the layers, and the ends of the model."""
    work = prices.compute + prices.recompute + prices.head
    exposed = (prices.tp_comm - prices.tp_hidden) + (prices.cp_comm - prices.cp_hidden)
    return work + exposed + prices.ep_comm


def _work_floor(job: Job, degrees: DegreeArrays, floor: FloorPrices, forced_seconds: Any) -> Any:
    """Least seconds of one microbatch in all stages together."""
    counts = np.array([kind.number for kind in _kinds(job)])[:, np.newaxis]
    layers = (counts * floor.layer.min(axis=1)).sum(axis=0)
    return layers + degrees.pp * floor.send + floor.ends + forced_seconds


def _slowest_floor(job: Job, degrees: DegreeArrays, floor: FloorPrices, forced_seconds: Any) -> Any:
    """Least seconds of one microbatch in the slowest stage."""
    layer = floor.layer.min(axis=(0, 1))
    fullest = np.maximum(np.ceil(job.model.num_layers / degrees.pp) * layer, degrees.interleave * layer + floor.ends)
    return np.maximum(_work_floor(job, degrees, floor, forced_seconds) / degrees.pp, fullest + floor.send)


def _step_floor(job: Job, degrees: DegreeArrays, floor: FloorPrices, forced_seconds: Any) -> NDArray[np.float64]:
    """The bound of `lower_bound_seconds`; `forced_seconds` is work of recompute that memory forces on all stages."""
    m, v = num_microbatches(job, degrees), degrees.interleave
    work = _work_floor(job, degrees, floor, forced_seconds)
    slowest = _slowest_floor(job, degrees, floor, forced_seconds)
    possible = np.isfinite(work)
    work, slowest = np.where(possible, work, 0.0), np.where(possible, slowest, 0.0)
    return np.where(possible, (m - 1 / v) * slowest + work / v + floor.tail, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Layers of the main kinds that each stage of each configuration can hold under each policy.

    owner: configuration of each stage, [stages]. is_last: the last of its pipeline. layers: [policies, stages], 0
    where the policy is not allowed. whole: whether they are whole numbers.
    """

    owner: NDArray[np.int64]
    is_last: NDArray[np.bool_]
    layers: NDArray[np.float64]
    whole: bool

    def in_all(self, layers: NDArray[np.float64], degrees: DegreeArrays) -> NDArray[np.float64]:
        """Sum over the stages of each configuration, [n]."""
        return np.asarray(np.bincount(self.owner, weights=layers, minlength=len(degrees)), dtype=np.float64)


def _whole(layers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Whole layers; rounding never takes one away."""
    return np.floor(layers * (1 + 1e-9))


def _forced_seconds(job: Job, degrees: DegreeArrays, floor: FloorPrices, rooms: Rooms) -> NDArray[np.float64]:
    """Least seconds of recompute in all stages together, infinite where the stages cannot hold all layers.

    The first policies together hold at most so many layers; each layer beyond pays the difference to the next.
    """
    num_layers, of_policies = num_main_layers(job), np.moveaxis(floor.layer[: floor.num_main], 0, 1)
    forced, held, price = np.zeros(len(degrees)), np.zeros(len(degrees)), np.full(of_policies.shape[1:], np.inf)
    room = np.zeros(len(rooms.owner))
    for layers, own in zip(rooms.layers, of_policies, strict=True):
        both = np.isfinite(price) & np.isfinite(own)
        dearer = (np.where(both, own, 0.0) - np.where(both, price, 0.0)).min(axis=0)
        forced += np.maximum(0.0, num_layers - held) * np.maximum(dearer, 0.0)
        price = np.where(np.isfinite(own), own, price)
        room = np.maximum(room, layers)
        held = rooms.in_all(room, degrees)
    return np.where(held >= num_layers * (1 - 1e-9), forced, np.inf)


def _holds_in_time(
    job: Job, degrees: DegreeArrays, floor: FloorPrices, rooms: Rooms, slowest_seconds: Any
) -> NDArray[np.bool_]:
    """Whether stages that take at most `slowest_seconds` for a microbatch can hold all layers."""
    spare = (slowest_seconds - floor.send)[rooms.owner] - np.where(rooms.is_last, floor.ends[rooms.owner], 0.0)
    held = held_in_time(spare, floor.main[:, rooms.owner], rooms.layers, rooms.whole)
    return np.asarray(rooms.in_all(held, degrees) >= num_main_layers(job) * (1 - 1e-9))


def held_in_time(spare_seconds: Any, layer_seconds: Any, room: Any, whole: bool) -> Any:
    """Layers that stages hold within some seconds, under the policy that lets each hold most, [stages].

    layer_seconds: of one more layer, and room: layers that memory allows, both [policies, stages]. whole: whether
    layers are whole numbers.
    """
    held = np.zeros(np.shape(spare_seconds))
    for price, most in zip(layer_seconds, room, strict=True):
        in_time = spare_seconds / price
        held = np.maximum(held, np.minimum(most, _whole(in_time) if whole else in_time))
    return held


def num_main_layers(job: AnyJob) -> int:
    """Layers of the main kinds, which `floor_prices` puts first and `rooms_of_stages` counts."""
    kinds = _kinds(job)
    return sum(kind.number for kind in kinds if kind.has_experts == kinds[0].has_experts)


def rooms_of_stages(job: Job, degrees: DegreeArrays, policies: PolicyMasks) -> Rooms:
    """What memory lets each stage hold.

    Memory grows linearly with the layers from two on, and not slower below; on stages inside the pipeline it does
    so with the microbatches in flight too, so that two such stages give all. Layers of another kind beside those
    that are counted only take room. Where all hold alike, a stage has whole layers.
    """
    owner = np.repeat(np.arange(len(degrees)), degrees.pp)
    index = np.arange(len(owner)) - (np.cumsum(degrees.pp) - degrees.pp)[owner]
    last = degrees.pp - 1
    ends = np.stack([np.zeros_like(last), np.minimum(1, last), np.maximum(last - 1, 0), last])
    waiting, some = _in_flight(job, degrees.take(owner), index), _in_flight(job, degrees, ends[1:3])
    between = some[1] - some[0]
    share = (waiting - some[0][owner]) / np.where(between == 0, 1.0, between)[owner]
    is_last, inside = index == last[owner], (index > 0) & (index < last[owner])

    def everywhere(values: NDArray[np.float64]) -> NDArray[np.float64]:
        linear = values[1][owner] + share * (values[2] - values[1])[owner]
        return np.asarray(np.where(inside, linear, np.where(is_last, values[3][owner], values[0][owner])))

    whole, layers = num_main_layers(job) == job.model.num_layers, []
    for policy, mask in policies.items():
        two, three = (everywhere(_bytes_with(job, degrees, ends, k, policy)) for k in (2, 3))
        most = np.maximum(2 + (job.memory_limit_bytes - two) / np.maximum(three - two, 1.0), 1.0)
        layers.append(np.where(mask[owner], _whole(most) if whole else most, 0.0))
    return Rooms(owner=owner, is_last=is_last, layers=np.stack(layers), whole=whole)


def _in_flight(job: Job, degrees: DegreeArrays, stage: Any) -> Any:
    m = num_microbatches(job, degrees)
    return in_flight_microbatches(degrees.schedule, degrees.pp, stage, m, degrees.interleave)


def _bytes_with(job: Job, degrees: DegreeArrays, index: Any, num_layers: int, policy: int) -> Any:
    stage = _stage_of_kind(_kinds(job)[0], index=index, num_layers=num_layers, policy=policy)
    return np.asarray(np.broadcast_to(stage_bytes(job, degrees, stage), np.shape(index)))


def always_fits(job: Job, degrees: DegreeArrays, cutoff_seconds: Any) -> NDArray[np.bool_]:
    """Where every filling of these configurations within the cutoff fits into memory, whatever it recomputes.

    Memory grows with the layers of a stage, which are at most `most_layers`, is largest without recompute, and lies
    between that of the two ends on the stages inside a pipeline. Stages of one chunk may begin anywhere.

    Source: derived here; tested against the priced columns.
    """
    most, last = most_layers(job, degrees, cutoff_seconds), degrees.pp - 1
    index = np.stack([np.zeros_like(last), np.minimum(1, last), np.maximum(last - 1, 0), last])
    pattern, layers, fits = pattern_of(job), np.maximum(most, 1), np.ones(len(degrees), dtype=bool)
    for start in range(pattern.num_states):
        stage = stage_of(job, index=index, num_layers=layers, policy=0, first=start, layout=degrees)
        fits &= np.broadcast_to(stage_fits(job, degrees, stage), index.shape).all(axis=0)
    return fits


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSplit:
    """Even splits of configurations, with the cheapest recompute policy that fits on each stage.

    first: position of each configuration's first stage, [n]. fits: [n]. The others are of all stages end to end.
    """

    first: NDArray[np.int64]
    fits: NDArray[np.bool_]
    layers: NDArray[np.int64]
    policy: NDArray[np.int64]
    seconds: NDArray[np.float64]
    fill_seconds: NDArray[np.float64]
    room_seconds: NDArray[np.float64]
    tail_seconds: NDArray[np.float64]

    @property
    def pace(self) -> NDArray[np.float64]:
        """Seconds from one microbatch to the next, of the slowest stage and its wait for the last chunk, [n]."""
        ends = np.append(self.first, len(self.layers))[1:]
        last_chunk = np.repeat(self.room_seconds[ends - 1], ends - self.first)
        each = pace_seconds(self.seconds, self.room_seconds, last_chunk)
        return np.asarray(np.maximum.reduceat(each, self.first), dtype=np.float64)

    @property
    def slowest(self) -> NDArray[np.float64]:
        """Seconds of one microbatch in the slowest stage, [n]."""
        return np.asarray(np.maximum.reduceat(self.seconds, self.first), dtype=np.float64)

    @property
    def longest_tail(self) -> NDArray[np.float64]:
        """Seconds of the longest tail, [n]."""
        return np.asarray(np.maximum.reduceat(self.tail_seconds, self.first), dtype=np.float64)


def can_interleave(job: AnyJob, degrees: DegreeArrays, index: Any, num_layers: Any) -> Any:
    """Whether the search knows which layers interleaved stages of so many layers hold (`stage_of`).

    All leading layers are in the first chunk; where the kinds of layers repeat, each chunk has equally many, which are
    whole periods (legality.py).
    """
    pattern = pattern_of(job)
    if pattern.period > 1:
        return num_layers == job.model.num_layers // degrees.pp
    return (index > 0) | (num_layers // degrees.interleave >= pattern.leading)


def even_splits(job: Job, degrees: DegreeArrays, policies: PolicyMasks) -> EvenSplit:
    """The even split of each configuration."""
    owner = np.repeat(np.arange(len(degrees)), degrees.pp)
    first = np.cumsum(degrees.pp) - degrees.pp
    index = np.arange(len(owner)) - first[owner]
    x = degrees.take(owner)
    layers = job.model.num_layers // x.pp + (index < job.model.num_layers % x.pp)
    choice = np.array(list(policies))[:, np.newaxis]
    before = index * (job.model.num_layers // x.pp) + np.minimum(index, job.model.num_layers % x.pp)
    stage = stage_of(job, index=index, num_layers=layers, policy=choice, first=before, layout=x)
    shape = (len(policies), len(owner))
    fits = np.broadcast_to(stage_fits(job, x, stage), shape)
    fits = fits & np.stack(list(policies.values()))[:, owner]
    if degrees.schedule == "interleaved":
        fits = fits & can_interleave(job, x, index, layers)
    prices = stage_prices(job, x, stage)
    terms = prices.microbatch_seconds, *interleaving_terms(job, x, stage, prices), prices.tail_seconds
    seconds, fill, room, tail = (np.broadcast_to(each, shape) for each in terms)
    which = np.where(fits, seconds, np.inf).argmin(axis=0)
    cheapest = which, np.arange(len(owner))
    return EvenSplit(
        first=first,
        fits=np.logical_and.reduceat(fits[cheapest], first),
        layers=layers,
        policy=choice[which, 0],
        seconds=seconds[cheapest],
        fill_seconds=fill[cheapest],
        room_seconds=room[cheapest],
        tail_seconds=tail[cheapest],
    )


def hides_exchanges(job: Job, degrees: DegreeArrays) -> bool:
    """Whether overlapped pairs of passes can hide exchanges and sends, which no bound may count then."""
    return job.engine.overlaps_paired_passes and degrees.schedule == "dualpipev"


def even_split_seconds(job: Job, degrees: DegreeArrays, policies: PolicyMasks) -> NDArray[np.float64]:
    """Step time of the even split with the cheapest policy that fits on each stage; infinite where it does not fit.

    A filling that exists, so an upper bound of what the configuration can do.
    """
    split = even_splits(job, degrees, policies)
    m, v = num_microbatches(job, degrees), degrees.interleave
    passes = np.add.reduceat(split.fill_seconds, split.first) / v
    return np.where(split.fits, (m - 1 / v) * split.pace + passes + split.longest_tail, np.inf)


def least_stage_bytes(job: Job, degrees: DegreeArrays, policies: Sequence[int]) -> NDArray[np.float64]:
    """The fullest stage of these configurations needs at least this many bytes, however layers are split.

    Some stage holds ceil(L / S) layers or more, L of the main kinds. Middle stages need less the later they are, so the
    least of the first, the last but one and the last stage bounds them all.

    Source: derived here; tested against the priced columns.
    """
    main, layers = _kinds(job)[0], np.ceil(num_main_layers(job) / degrees.pp)
    last = degrees.pp - 1
    index = np.stack([np.zeros_like(last), np.maximum(last - 1, 0), last])
    shapes = [_stage_of_kind(main, index=index, num_layers=layers, policy=policy) for policy in policies]
    least = [np.broadcast_to(stage_bytes(job, degrees, shape), index.shape).min(axis=0) for shape in shapes]
    return np.asarray(np.minimum.reduce(least))


def _least_last_stage_bytes(job: Job, degrees: DegreeArrays) -> NDArray[np.float64]:
    """The last stage needs at least this many bytes, whatever layers it holds: the head, the logits and the loss.

    Source: derived here; tested against the priced columns.
    """
    alone = _stage_of_kind(_kinds(job)[0], index=degrees.pp - 1, num_layers=0, policy=0)
    return np.asarray(np.broadcast_to(stage_bytes(job, degrees, alone), len(degrees)), dtype=np.float64)


def of_smallest_microbatches(job: AnyJob, degrees: DegreeArrays) -> tuple[DegreeArrays, NDArray[np.int64]]:
    """Fewer configurations that need no more memory, but for rounding, and which of them stands for each given one.

    They have one sequence to a microbatch: larger microbatches hold more each, and as many are in flight as long as
    there are several. A single one adds up no gradients, and what GPipe holds of each is less for fewer: these stay.

    Source: derived here; tested against `least_stage_bytes` of each.
    """
    alike = (degrees.dp * degrees.mbs < job.training.global_batch_size) & (degrees.schedule in ("1f1b", "interleaved"))
    smallest = degrees.having("mbs", np.where(alike, 1, degrees.mbs))
    return smallest.distinct(*smallest.numbers())


def may_fit(
    job: AnyJob, degrees: DegreeArrays, policies: Sequence[int], *, expects_little: bool = False
) -> NDArray[np.bool_]:
    """Whether memory may be enough, in some pool and under some policy, by `least_stage_bytes`.

    expects_little: look first at what many configurations share, which pays where few of them fit: at one sequence to a
    microbatch, and at the loss on the last stage.
    """
    if not expects_little:
        return _have_room(job, degrees, policies, 1.0)
    smallest, position = of_smallest_microbatches(job, degrees)
    fits = _have_room(job, smallest, policies, 1 + TIE)[position]
    if fits.any():
        left, ends = np.flatnonzero(fits), degrees.take(fits)
        rooms = [_least_last_stage_bytes(pool, ends) <= pool.memory_limit_bytes for pool in pools_of(job)]
        fits[left] = np.logical_or.reduce(rooms)
    if fits.any():
        fits[fits] = _have_room(job, degrees.take(fits), policies, 1.0)
    return fits


def _have_room(job: AnyJob, degrees: DegreeArrays, policies: Sequence[int], share: float) -> NDArray[np.bool_]:
    """Whether the least stage bytes are within this share of the limit of some pool, under some policy.

    Policies that recompute most come first: they leave room for most, and only the rest is looked at again.
    """
    fits: NDArray[Any] = np.zeros(len(degrees), dtype=np.bool_)
    for pool, policy in product(pools_of(job), sorted(policies, reverse=True)):
        left = np.flatnonzero(~fits)
        if len(left):
            fits[left] = least_stage_bytes(pool, degrees.take(left), [policy]) <= share * pool.memory_limit_bytes
    return fits
