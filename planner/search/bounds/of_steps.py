"""What no assignment of a configuration can beat: bounds of its step, before it is priced stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.prices import num_microbatches, stage_fits, stage_prices
from planner.cost.schedule import steady_count, step_seconds
from planner.cost.shapes import spread
from planner.cost.stage import stage_of
from planner.cost.traffic import StageWindow, data_parallel_seconds
from planner.search.bounds.of_layers import (
    INSIDE,
    kinds_main_first,
    layer_shapes,
    most_layers,
    num_main_layers,
    stage_of_kind,
)
from planner.search.bounds.of_memory import capacities_of_stages, held_in_time
from planner.search.space.arrays import TIE
from planner.search.space.configurations import choices_of
from planner.specs.recompute import NONE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.cost.prices import StagePrices
    from planner.numbers import Number, Rows
    from planner.search.bounds.of_layers import LayerShapes
    from planner.search.bounds.of_memory import Capacities
    from planner.search.space.configurations import DegreeArrays, PolicyChoices, PolicyMasks
    from planner.specs.job import Job, PoolJob

_LONG = 1e30  # seconds; longer than anything, and finite


def lower_bound_seconds(
    job: PoolJob,
    degrees: DegreeArrays,
    policies: PolicyMasks,
    *,
    cutoff_seconds: Number = np.inf,
    any_replicas: bool = False,
) -> NDArray[np.float64]:
    """A step of these configurations takes at least this long, however layers and recompute are chosen.

    any_replicas: and with any number of replicas of the sharded group, which is 1 here: more of them need more memory
    and more of the optimizer's work; traffic between data-parallel ranks is left out.

    A stage with k layers takes at least k rho + send, rho being the price of a layer inside a stage of the most
    layers (`least_costs`). Summed over the stages and with what the last stage has besides, that is all work;
    the slowest of S stages takes the mean of it, and ceil(L / S) layers, and one layer a chunk and the head. Then
    T >= (m - 1/v) * slowest + all work / v + the tail of a stage of ceil(L / S) layers. Configurations that may
    stay within the cutoff by that are bounded again with the recompute that their memory forces on them.

    Buys (`step`): GPT-3 on 1,024 devices 0.46 s in place of 7.41, DeepSeek-V3 on 11,000 1.46 in place of over 15.

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
        costs = least_costs(job, left, _of(policies, piped), cutoff[piped], any_replicas)
        bounds[piped] = _least_step(job, left, costs, 0.0)
        near = bounds[piped] <= cutoff[piped]
        if not near.any():
            return bounds
        piped = piped[near]
        chosen = _of(policies, piped)
        bounds[piped] = _bound_by_memory(job, degrees.take(piped), costs.take(near), chosen, cutoff[piped])
    return bounds


def least_seconds_of_any_policy(job: PoolJob, degrees: DegreeArrays, cutoff_seconds: Number) -> NDArray[np.float64]:
    """A step of these configurations takes at least this long whatever they recompute, and with any replicas.

    The bound of `lower_bound_seconds` of what recomputes nothing, were there memory enough: recompute hides at most as
    much traffic as it takes.

    Buys (`any-policy`): DeepSeek-V3 on 2,048 devices, five policies, 2.2 s in place of 2.7 (busy machine).

    Source: derived here; tested to stay below the exact optimum.
    """
    bounds, nothing = np.zeros(len(degrees)), {NONE: np.ones(len(degrees), dtype=bool)}
    piped = np.flatnonzero(degrees.pp > 1)
    if len(piped):
        left = degrees.take(piped)
        cutoff = np.broadcast_to(cutoff_seconds, (len(degrees),))[piped]
        left = left.having("recompute", np.full(len(left), NONE))
        costs = least_costs(job, left, _of(nothing, piped), cutoff, any_replicas=True)
        bounds[piped] = _least_step(job, left, costs, 0.0)
    return bounds


def _of(policies: PolicyMasks, index: Rows) -> PolicyMasks:
    return {policy: mask[index] for policy, mask in policies.items()}


def single_stage_seconds(
    job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks, any_replicas: bool
) -> NDArray[np.float64]:
    """The exact step time of configurations without a pipeline, whose stage has all layers."""
    choices = choices_of(degrees, policies)
    stage = stage_of(job, index=np.zeros_like(degrees.pp), num_layers=job.model.num_layers, policy=choices.policy)
    prices = stage_prices(job, degrees, stage)
    seconds = num_microbatches(job, degrees) * prices.microbatch_seconds + prices.tail_seconds
    if any_replicas:
        traffic = num_microbatches(job, degrees) * prices.dp_exposed_each + prices.dp_exposed_once
        seconds = seconds - traffic * (1 + 1e-9)
    fits = stage_fits(job, degrees, stage) & choices.allowed
    return np.asarray(np.where(fits, seconds, np.inf).min(axis=0))


def _bound_by_memory(
    job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, policies: PolicyMasks, cutoff_seconds: Number
) -> NDArray[np.float64]:
    """The bound with what memory lets each stage hold, infinite where that is more than the cutoff for sure.

    Buys (`memory-phase`): GPT-3 on 1,024 devices 0.68 s in place of 1.98; DeepSeek-V3 on 11,000 nothing (1.38, 1.43).
    """
    capacities = capacities_of_stages(job, degrees, policies)
    forced = _forced_seconds(job, degrees, costs, capacities)
    bounds = _least_step(job, degrees, costs, forced)
    steady = steady_count(num_microbatches(job, degrees), degrees.interleave)
    possible = np.isfinite(bounds)
    slowest = np.where(possible, _least_slowest(job, degrees, costs, forced), 0.0)
    rest = np.where(possible, bounds, 0.0) - steady * slowest
    most = (cutoff_seconds - rest) / np.maximum(steady, 1e-9)
    held = _holds_in_time(job, degrees, costs, capacities, np.where(np.isfinite(most), most, _LONG))
    return np.where(held, bounds, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCosts:
    """Least prices of the stages of configurations; of kinds and choices of a policy by the leading axes.

    layer: [kinds, choices, n] seconds of one more layer, infinite where a policy is not allowed. num_main: kinds that
    come first and hold as many parameters as each other. send: [n] of each stage. ends: [n] of the last stage besides
    its layers. tail: [n] of the longest tail.
    """

    layer: Number
    num_main: int
    send: Number
    ends: Number
    tail: Number

    @property
    def main(self) -> Number:
        """Seconds of one more layer of the fastest of the main kinds, [policies, n]."""
        return self.layer[: self.num_main].min(axis=0)

    def take(self, index: Rows) -> LeastCosts:
        """The prices of these configurations."""
        return LeastCosts(
            layer=self.layer[:, :, index],
            num_main=self.num_main,
            send=self.send[index],
            ends=self.ends[index],
            tail=self.tail[index],
        )


def least_costs(
    job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: Number, any_replicas: bool
) -> LeastCosts:
    """Least prices of a layer, from stages of the most layers: launches and latencies are spread over most there.

    The part of a data-parallel collective that is exposed grows less than proportionally with the layers, so that its
    price for each of the most layers is a lower bound too. Where a stage may hold layers of two kinds, whose
    computation hides each other's traffic, that part is left out of them; `_least_transfer` bounds it once a step.
    The last stage hides traffic behind layers for multi-token prediction too, and moves theirs: they count as its own.
    """
    main, n, shapes = kinds_main_first(job)[0], len(degrees), layer_shapes(job, degrees)
    most = np.maximum(most_layers(job, degrees, cutoff_seconds, shapes), 1) + job.model.mtp_layers
    counts_alike = not job.model.mtp_layers or main[:2] == (job.model.moe is not None, False)
    choices = choices_of(degrees, policies)
    stage = stage_of_kind(main, index=INSIDE, num_layers=most, policy=choices.policy)
    prices = stage_prices(job, degrees, stage, spread(shapes.parts, shapes.position))
    send = prices.pp_comm - prices.pp_hidden
    each, once = prices.microbatch_seconds - send, prices.tail_seconds
    others, ends = _small_prices(job, shapes, policies, choices)
    if any_replicas or len(others) or not counts_alike:
        each = each - prices.dp_exposed_each
    if len(others) or not counts_alike:
        each = each - prices.host_exposed_each
    if any_replicas:
        once = once - prices.dp_exposed_once
    if _takes_turns(job) or not counts_alike:
        once = prices.optimizer
    shape = (len(choices.policy), n)
    tail = _least_tail(job, degrees, np.broadcast_to(once, shape), most)
    if not any_replicas and counts_alike:
        counts = np.array([kind.number for kind in kinds_main_first(job)[1:]])[:, np.newaxis, np.newaxis]
        window = np.broadcast_to(_in_proportion(prices) / most, shape), (counts * others).sum(axis=0)
        update = np.broadcast_to(prices.optimizer, shape).min(axis=0)
        tail = np.maximum(tail, _least_transfer(job, degrees, update, window, most))
    layer = np.concatenate([np.broadcast_to(each, shape)[np.newaxis] / most, others])
    return LeastCosts(
        layer=np.where(choices.allowed, layer, np.inf),
        num_main=sum(kind.has_experts == main.has_experts for kind in kinds_main_first(job)),
        send=np.broadcast_to(send, (n,)),
        ends=ends,
        tail=tail,
    )


def _small_prices(
    job: PoolJob, shapes: LayerShapes, policies: PolicyMasks, choices: PolicyChoices
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of a layer of the other kinds, [kinds - 1, choices, n], and of the last stage besides its layers, [n].

    Only what is in proportion to the layers, which few of the degrees decide.
    """
    distinct = shapes.degrees.having("pp", np.full(len(shapes.degrees), 2))
    main, *others = kinds_main_first(job)
    rows = [
        *((index, 0, main.has_experts, main.is_local) for index in (INSIDE, 1)),
        *((INSIDE, policy, kind.has_experts, kind.is_local) for kind in others for policy in policies),
    ]
    index, policy, *kind = (np.array(column)[:, np.newaxis] for column in zip(*rows, strict=True))
    prices = stage_prices(job, distinct, stage_of_kind(kind, index=index, num_layers=1, policy=policy), shapes.parts)
    seconds = np.broadcast_to(_in_proportion(prices), (len(rows), len(distinct)))
    of_others = seconds[2:].reshape(len(others), len(policies), len(distinct))
    return of_others[:, choices.which, shapes.position], (seconds[1] - seconds[0])[shapes.position]


def _least_tail(
    job: PoolJob, degrees: DegreeArrays, tail_seconds: NDArray[np.float64], most: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Least seconds of the longest tail, from the tails of a stage of the most layers of the first kind.

    That is the slowest of the main kinds, whose computation hides most. Some stage has main kinds only and at least q
    layers: all stages but one that has leading layers too, where there are any, and those before it, which have
    leading layers alone. Where dense layers and those with experts take turns, others are beside the q layers, and
    `tail_seconds` is what more layers only add to, the optimizer's.

    Buys (`tail`, least of 15): Llama-3-405B on 16,384 devices 0.62 s in place of 0.68, where it leaves 112
    configurations to be priced in place of 154; GPT-3 on 1,024 nothing (0.36 both).
    """
    others: Number = degrees.pp
    rest: Number = num_main_layers(job)
    if rest < job.model.num_layers and not _takes_turns(job):
        rest, others = rest - most, np.maximum(others - 1, 1)
    layers = np.maximum(np.ceil(rest / others), 0)
    return np.asarray(layers / most * tail_seconds.min(axis=0))


def _least_transfer(
    job: PoolJob,
    degrees: DegreeArrays,
    optimizer_seconds: Number,
    window_seconds: tuple[Number, Number],
    most: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Least seconds of the longest tail, from what the stage with most layers of the main kinds has to move.

    It has k of them, from q = ceil(L / S) to the most, and other layers only add to what it moves and updates. All of
    it but what its layers can hide is exposed, and at least one part of as many as it has layers. What k layers move is
    concave in k (latencies, and the quickest algorithm for so many bytes), what they hide is in proportion, so that the
    difference is least at one of the two ends.

    window_seconds: [policies, n], what one layer of the main kinds hides, and all the others together; no stage hides
    more. optimizer_seconds: [n], of a stage of the most layers.

    Buys (`transfer`): DeepSeek-V3 on 100,000 devices 5.10 s in place of 10.42; GPT-3 there 0.96 in place of 1.03. With
    both ends, and not the window of the most layers alone, DeepSeek-V3 there takes 3.67 s in place of 10.65.

    Source: derived here; tested against all ways to partition small models.
    """
    layers = np.ceil(num_main_layers(job) / degrees.pp)
    each, others = window_seconds
    moved, exposed = [], []
    for count in (layers, np.maximum(layers, most)):
        stage = stage_of_kind(kinds_main_first(job)[0], index=INSIDE, num_layers=count, policy=0)
        moved.append(data_parallel_seconds(job, degrees, stage, StageWindow(forward=0.0, backward=0.0)).busy_per_step)
        hidden = (each * count + others).max(axis=0) if job.engine.overlap.data_parallel else 0.0
        exposed.append(moved[-1] - hidden)
    updated = np.minimum(layers / most, 1.0) * optimizer_seconds
    return np.asarray(updated + np.maximum(moved[0] / np.maximum(layers, most), np.minimum(*exposed)))


def _takes_turns(job: Job) -> bool:
    """Whether dense layers and those with experts alternate behind the leading ones."""
    return job.model.moe is not None and job.model.moe.layer_frequency > 1


def _in_proportion(prices: StagePrices) -> Number:
    """What grows in proportion to the layers, and the ends of the model."""
    work = prices.compute + prices.recompute + prices.head
    exposed = (prices.tp_comm - prices.tp_hidden) + (prices.cp_comm - prices.cp_hidden)
    return work + exposed + prices.ep_comm


def _least_work(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> Number:
    """Least seconds of one microbatch in all stages together."""
    counts = np.array([kind.number for kind in kinds_main_first(job)])[:, np.newaxis]
    layers = (counts * costs.layer.min(axis=1)).sum(axis=0)
    return layers + degrees.pp * costs.send + costs.ends + forced_seconds


def _least_slowest(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> Number:
    """Least seconds of one microbatch in the slowest stage, [n].

    That stage has no less than the mean of all work. And layers are whole: neither all of them at the price of the
    fastest kind, nor those of the main kinds at theirs, can be spread more evenly (`_layers_of_slowest`).

    Buys (`whole-layers`): DeepSeek-V3 on 100,000 devices 7.3 s in place of 8.5 (busy machine).
    """
    layer, main = costs.layer.min(axis=(0, 1)), costs.main.min(axis=0)
    fullest = degrees.interleave * layer + costs.ends
    for seconds, count in ((layer, job.model.num_layers), (main, num_main_layers(job))):
        fullest = np.maximum(fullest, seconds * _layers_of_slowest(count, degrees.pp, costs.ends / seconds))
    return np.maximum(_least_work(job, degrees, costs, forced_seconds) / degrees.pp, fullest + costs.send)


def _layers_of_slowest(num_layers: int, num_stages: Number, ends: Number) -> Number:
    """Least time of the slowest of so many stages in units of a layer, where the last one has `ends` besides, [n].

    Stages of time t hold floor(t) layers, the last one floor(t - ends). With k = floor(t) that is S k - ceil(ends) in
    all, or S k - floor(ends) from t = k + (the fraction of ends) on. So the least t that holds all L is a whole one, or
    one with that fraction.

    Source: derived here; tested against all ways to divide the layers.
    """
    ends = np.maximum(ends - TIE, 0.0)
    whole = np.ceil((num_layers + np.ceil(ends)) / num_stages)
    broken = np.ceil((num_layers + np.floor(ends)) / num_stages) + ends - np.floor(ends)
    return np.maximum(np.minimum(whole, broken), ends)


def _least_step(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> NDArray[np.float64]:
    """The bound of `lower_bound_seconds`; `forced_seconds` is work of recompute that memory forces on all stages."""
    m, v = num_microbatches(job, degrees), degrees.interleave
    work = _least_work(job, degrees, costs, forced_seconds)
    slowest = _least_slowest(job, degrees, costs, forced_seconds)
    possible = np.isfinite(work)
    work, slowest = np.where(possible, work, 0.0), np.where(possible, slowest, 0.0)
    return np.where(possible, step_seconds(m, v, slowest, work, costs.tail), np.inf)


def _forced_seconds(
    job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, capacities: Capacities
) -> NDArray[np.float64]:
    """Least seconds of recompute in all stages together, infinite where the stages cannot hold all layers.

    The first policies together hold at most so many layers; each layer beyond pays the difference to the cheapest of
    those that follow.
    """
    num_layers, of_policies = num_main_layers(job), np.moveaxis(costs.layer[: costs.num_main], 0, 1)
    of_policies = np.minimum.accumulate(of_policies[::-1])[::-1]
    forced, held, price = np.zeros(len(degrees)), np.zeros(len(degrees)), np.full(of_policies.shape[1:], np.inf)
    capacity = np.zeros(len(capacities.owner))
    for layers, own in zip(capacities.layers, of_policies, strict=True):
        both = np.isfinite(price) & np.isfinite(own)
        dearer = (np.where(both, own, 0.0) - np.where(both, price, 0.0)).min(axis=0)
        forced += np.maximum(0.0, num_layers - held) * np.maximum(dearer, 0.0)
        price = np.where(np.isfinite(own), own, price)
        capacity = np.maximum(capacity, layers)
        held = capacities.in_all(capacity, degrees)
    return np.where(held >= num_layers * (1 - 1e-9), forced, np.inf)


def _holds_in_time(
    job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, capacities: Capacities, slowest_seconds: Number
) -> NDArray[np.bool_]:
    """Whether stages that take at most `slowest_seconds` for a microbatch can hold all layers."""
    spare = (slowest_seconds - costs.send)[capacities.owner] - np.where(
        capacities.is_last, costs.ends[capacities.owner], 0.0
    )
    held = held_in_time(spare, costs.main[:, capacities.owner], capacities.layers, capacities.whole)
    return np.asarray(capacities.in_all(held, degrees) >= num_main_layers(job) * (1 - 1e-9))
