"""Lower bounds of a configuration's step time, before its stages are priced one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.compute import PassSeconds
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import stage_fits, stage_prices
from planner.cost.schedule import steady_count, step_seconds
from planner.cost.shapes import spread
from planner.cost.stage import stage_of
from planner.cost.traffic import data_parallel_seconds
from planner.search.bounds.of_layers import (
    INSIDE,
    kinds_main_first,
    layer_shapes,
    leading_layers,
    most_layers,
    mtp_of_last,
    num_main_layers,
    stage_of_kind,
)
from planner.search.bounds.of_memory import capacities_of_stages, held_in_time
from planner.search.space.arrays import TIE
from planner.search.space.degree_rules import least_of_first_stage, searched_ends
from planner.search.space.policies import choices_of
from planner.specs.recompute import NONE, is_of_some_layers, whole_policy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.cost.prices import StagePrices
    from planner.numbers import Number, Rows
    from planner.search.bounds.of_layers import LayerShapes
    from planner.search.bounds.of_memory import Capacities
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.search.space.policies import PolicyChoices
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
    """Lower bound of the step of each configuration, for every assignment of layers and recompute.

    any_replicas: make the bound valid for every number of replicas of the sharded group, and every place of multi-token
    prediction. The degrees have one replica,
    which needs least memory and optimizer work, and the bound leaves out traffic between data-parallel ranks.

    A stage with k layers takes at least k rho + send, where rho is the price of a layer in a stage with the most layers
    (`least_costs`). The sum over the stages, plus the last stage's work outside its layers, is all work. Three values
    bound the slowest of S stages from below: the mean of all work, the time of ceil(L / S) layers, and the time of one
    layer per chunk and the head. Then T >= (m - 1/v) * slowest + all work / v + the tail of a stage of ceil(L / S)
    layers. Configurations whose bound stays within the cutoff get a second bound, with the recompute that their memory
    requires.

    Gain (`step`): the search takes 0.46 s instead of 7.41 s for GPT-3 on 1,024 devices, and 1.46 s instead of over 15 s
    for DeepSeek-V3 on 11,000.

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
    """Lower bound of the step of each configuration under every recompute policy and number of replicas.

    This is the bound of `lower_bound_seconds` without recompute and without memory limits. The bound holds for every
    policy, because recompute hides at most as many seconds of traffic as it adds in computing.

    Gain (`any-policy`): the search takes 2.2 s instead of 2.7 s for DeepSeek-V3 on 2,048 devices with five policies
    (busy machine).

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
    """The exact step time of configurations without a pipeline: their only stage holds all layers."""
    choices = choices_of(degrees, policies)
    stage = stage_of(job, index=np.zeros_like(degrees.pp), num_layers=job.model.num_layers, policy=choices.policy)
    prices = stage_prices(job, degrees, stage)
    seconds = num_microbatches(job, degrees) * prices.microbatch_seconds + prices.tail_seconds
    if any_replicas:
        traffic = num_microbatches(job, degrees) * prices.dp.exposed.total + prices.dp.exposed_once
        seconds = seconds - traffic * (1 + 1e-9)
    fits = stage_fits(job, degrees, stage) & choices.allowed
    return np.asarray(np.where(fits, seconds, np.inf).min(axis=0))


def _bound_by_memory(
    job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, policies: PolicyMasks, cutoff_seconds: Number
) -> NDArray[np.float64]:
    """The bound with each stage limited to its capacity; infinite if the step certainly exceeds the cutoff.

    Gain (`memory-phase`): the search takes 0.68 s instead of 1.98 s for GPT-3 on 1,024 devices. DeepSeek-V3 on 11,000
    devices gains nothing (1.38 s and 1.43 s).
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
    """Least prices of the stages of configurations; the leading axes are kinds of layers and choices of a policy.

    layer: seconds of one more layer, [kinds, choices, n]; infinite if a policy is not allowed.
    num_main: number of main kinds, which come first and all have the same number of parameters.
    send: seconds of each stage's send, [n].
    ends: seconds of the model outside its layers, [n].
    last: the part of `ends` that is on the last stage wherever multi-token prediction may stand, [n].
    tail: seconds of the longest tail, [n].
    """

    layer: Number
    num_main: int
    send: Number
    ends: Number
    last: Number
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
            last=self.last[index],
            tail=self.tail[index],
        )


def least_costs(
    job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: Number, any_replicas: bool
) -> LeastCosts:
    """Least prices of a layer, from stages with the most layers, where the most layers share launches and latencies.

    The exposed part of a data-parallel collective grows less than proportionally with the layers, so its price per
    layer in the largest stage is a lower bound, too. The same is true of the price of a layer if k layers of each chunk
    recompute. If a stage can hold two kinds of layers, computing one kind can hide the traffic of the other. The prices
    of layers then exclude the exposed part, and `_least_transfer` is a lower bound of it, which is added once per step.
    Layers for multi-token prediction belong to the last stage, which hides traffic behind them and moves their weights.
    """
    main, n, shapes = kinds_main_first(job)[0], len(degrees), layer_shapes(job, degrees)
    most = np.maximum(most_layers(job, degrees, cutoff_seconds, shapes), 1) + job.model.mtp_layers
    counts_alike = not job.model.mtp_layers or main[:2] == (job.model.moe is not None, False)
    choices = choices_of(degrees, policies)
    stage = stage_of_kind(main, index=INSIDE, num_layers=most, policy=choices.policy)
    prices = stage_prices(job, degrees, stage, spread(shapes.parts, shapes.position))
    send = prices.pp_comm - prices.pp_hidden
    each = prices.microbatch_seconds - send
    hiding = prices  # if only some layers recompute, a smaller stage may recompute all its layers, and so hide more
    if any(map(is_of_some_layers, policies)):
        codes, which = np.unique(choices.policy, return_inverse=True)
        whole = np.array([whole_policy(code) for code in codes.tolist()])[which.reshape(choices.policy.shape)]
        stage = stage_of_kind(main, index=INSIDE, num_layers=most, policy=whole)
        hiding = stage_prices(job, degrees, stage, spread(shapes.parts, shapes.position))
    once = hiding.tail_seconds
    others, ends, last = _small_prices(job, shapes, policies, choices)
    if any_replicas or len(others) or not counts_alike:
        each = each - prices.dp.exposed.total
    if len(others) or not counts_alike:
        each = each - prices.host.exposed.total
    if any_replicas:
        once = once - hiding.dp.exposed_once
    if _takes_turns(job) or not counts_alike:
        once = prices.optimizer
    shape = (len(choices.policy), n)
    tail = _least_tail(job, degrees, np.broadcast_to(once, shape), most)
    if not any_replicas and counts_alike:
        counts = np.array([kind.number for kind in kinds_main_first(job)[1:]])[:, np.newaxis, np.newaxis]
        window = np.broadcast_to(_in_proportion(hiding) / most, shape), (counts * others).sum(axis=0)
        update = np.broadcast_to(prices.optimizer, shape).min(axis=0)
        tail = np.maximum(tail, _least_transfer(job, degrees, update, window, most))
    layer = np.concatenate([np.broadcast_to(each, shape)[np.newaxis] / most, others])
    return LeastCosts(
        layer=np.where(choices.allowed, layer, np.inf),
        num_main=sum(kind.has_experts == main.has_experts for kind in kinds_main_first(job)),
        send=np.broadcast_to(send, (n,)),
        ends=ends,
        last=last if any_replicas else np.where(degrees.mtp_before > 0, last, ends),
        tail=tail,
    )


def _small_prices(
    job: PoolJob, shapes: LayerShapes, policies: PolicyMasks, choices: PolicyChoices
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of a layer of each kind but the first, [kinds - 1, choices, n], and `ends` and `last` of `LeastCosts`.

    The prices include only work that is proportional to the layers, which depends on few degrees. If a policy
    recomputes only some layers, the layers of a further kind may be among the layers that do not recompute.
    """
    distinct = shapes.degrees.having("pp", np.full(len(shapes.degrees), 2))
    main, *others = kinds_main_first(job)
    of_others = [NONE if is_of_some_layers(code) else code for code in policies]
    mtp, apart = job.model.mtp_layers, mtp_of_last(job) is not None
    rows = [
        *((index, 0, number, main.has_experts, main.is_local) for index, number in ((INSIDE, 0), (1, mtp), (1, 0))),
        *((INSIDE, policy, 0, kind.has_experts, kind.is_local) for kind in others for policy in of_others),
    ]
    index, policy, further, *kind = (np.array(column)[:, np.newaxis] for column in zip(*rows, strict=True))
    stage = stage_of_kind(kind, index=index, num_layers=1, policy=policy, num_mtp=further if mtp else None)
    prices = stage_prices(job, distinct, stage, shapes.parts)
    seconds = np.broadcast_to(_in_proportion(prices), (len(rows), len(distinct)))
    inside, whole, without = seconds[:3, shapes.position]
    of_kinds = seconds[3:].reshape(len(others), len(policies), len(distinct))
    last = (without if apart else whole) - inside
    return of_kinds[:, choices.which, shapes.position], whole - inside, last


def _least_tail(
    job: PoolJob, degrees: DegreeArrays, tail_seconds: NDArray[np.float64], most: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Least seconds of the longest tail, derived from the tail of a stage with the most layers, all of the first kind.

    The first kind is the slowest of the main kinds, and its computation hides most. At least one stage has only layers
    of the main kinds, and has at least q layers. The model's leading layers, if it has any, fill the first stages, and
    at most one stage holds both leading layers and layers of the main kinds. If dense layers and layers with experts
    alternate, layers of the other kind lie between the q layers. `tail_seconds` is then only the optimizer's time,
    which the other layers can only increase.

    Gain (`tail`, least of 15): the search takes 0.62 s instead of 0.68 s for Llama-3-405B on 16,384 devices, and prices
    112 configurations instead of 154. GPT-3 on 1,024 devices gains nothing (0.36 s in both cases).
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
    """Least seconds of the longest tail, from the traffic of the stage with the most layers of the main kinds.

    This stage has k layers of the main kinds, from q = ceil(L / S) to the most. Other layers only add to its traffic
    and its update. The traffic that its layers cannot hide is exposed; this is at least the traffic of one layer. The
    time to move k layers is concave in k (latencies, and the quickest algorithm for the bytes), and the time that k
    layers hide is proportional to k. So the difference is smallest at one of the two ends of the range of k.

    window_seconds: the most seconds of communication that a stage can hide, as two arrays [policies, n]: behind one
    layer of the main kinds, and behind all other layers together.
    optimizer_seconds: seconds of the optimizer on a stage that holds the most layers, [n].

    Gain (`transfer`): on 100,000 devices the search takes 5.10 s instead of 10.42 s for DeepSeek-V3, and 0.96 s instead
    of 1.03 s for GPT-3. If both ends of the range of k are used, instead of the most layers alone, DeepSeek-V3 there
    takes 3.67 s instead of 10.65 s.

    Source: derived here; tested against all ways to partition small models.
    """
    layers = np.ceil(num_main_layers(job) / degrees.pp)
    each, others = window_seconds
    moved, exposed = [], []
    for count in (layers, np.maximum(layers, most)):
        stage = stage_of_kind(kinds_main_first(job)[0], index=INSIDE, num_layers=count, policy=0)
        moved.append(data_parallel_seconds(job, degrees, stage, PassSeconds()).busy_once)
        hidden = (each * count + others).max(axis=0) if job.engine.overlap.data_parallel else 0.0
        exposed.append(moved[-1] - hidden)
    updated = np.minimum(layers / most, 1.0) * optimizer_seconds
    return np.asarray(updated + np.maximum(moved[0] / np.maximum(layers, most), np.minimum(*exposed)))


def _takes_turns(job: Job) -> bool:
    """Whether dense layers and layers with experts alternate after the leading layers."""
    return job.model.moe is not None and job.model.moe.layer_frequency > 1


def _in_proportion(prices: StagePrices) -> Number:
    """Seconds that grow in proportion to the layers, plus the seconds of the model's two ends."""
    work = prices.compute + prices.recompute + prices.head + prices.ungraded
    exposed = (prices.tp_comm - prices.tp_hidden) + (prices.cp_comm - prices.cp_hidden)
    return work + exposed + prices.ep_comm


def _least_work(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> Number:
    """Least seconds of one microbatch in all stages together."""
    counts = np.array([kind.number for kind in kinds_main_first(job)])[:, np.newaxis]
    layers = (counts * costs.layer.min(axis=1)).sum(axis=0)
    return layers + degrees.pp * costs.send + costs.ends + forced_seconds


def _least_slowest(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> Number:
    """Least seconds of one microbatch in the slowest stage, [n].

    The slowest stage has at least the mean of all work. Stages hold whole layers, which gives two further bounds
    (`_layers_of_slowest`). The first prices all layers like the fastest kind, and the second prices only the layers of
    the main kinds.

    Gain (`whole-layers`): the search takes 7.3 s instead of 8.5 s for DeepSeek-V3 on 100,000 devices (busy machine).
    """
    layer, main = costs.layer.min(axis=(0, 1)), costs.main.min(axis=0)
    alone = searched_ends(job) > 0  # the last chunk may hold the loss without a layer
    fullest = (degrees.interleave - alone) * layer + costs.last
    # behind multi-token prediction in a stage of its own the last stage holds the loss and nothing else
    before = (degrees.mtp_before > 0) & (degrees.interleave == 1)
    stages, further = degrees.pp - before, np.where(before, costs.ends - costs.last, costs.last)
    for seconds, count in ((layer, job.model.num_layers), (main, num_main_layers(job))):
        fullest = np.maximum(fullest, seconds * _layers_of_slowest(count, stages, further / seconds))
    return np.maximum(_least_work(job, degrees, costs, forced_seconds) / degrees.pp, fullest + costs.send)


def _layers_of_slowest(num_layers: int, num_stages: Number, ends: Number) -> Number:
    """Least time of the slowest of S stages over all splits of the layers, in units of a layer, [n].

    ends: units of the last stage's other work, [n].

    In time t a stage holds floor(t) layers, and the last stage holds floor(t - ends). With k = floor(t) all stages
    together hold S k - ceil(ends) layers, or S k - floor(ends) from t = k + (the fraction of ends) on. Therefore the
    least t at which the stages hold all L layers is a whole number, or a whole number plus that fraction.

    Source: derived here; tested against all ways to divide the layers.
    """
    ends = np.maximum(ends - TIE, 0.0)
    whole = np.ceil((num_layers + np.ceil(ends)) / num_stages)
    broken = np.ceil((num_layers + np.floor(ends)) / num_stages) + ends - np.floor(ends)
    return np.maximum(np.minimum(whole, broken), ends)


def _least_step(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> NDArray[np.float64]:
    """The bound of `lower_bound_seconds`.

    forced_seconds: least recompute time of all stages together.
    """
    m, v = num_microbatches(job, degrees), degrees.interleave
    work = _least_work(job, degrees, costs, forced_seconds)
    slowest = _least_slowest(job, degrees, costs, forced_seconds)
    possible = np.isfinite(work)
    work, slowest = np.where(possible, work, 0.0), np.where(possible, slowest, 0.0)
    return np.where(possible, step_seconds(m, v, slowest, work, costs.tail), np.inf)


def _forced_seconds(
    job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, capacities: Capacities
) -> NDArray[np.float64]:
    """Least seconds of recompute in all stages together; infinite if the stages cannot hold all layers.

    Memory limits how many layers can use the policies up to each position in the list. Each layer beyond this number
    costs at least the difference in price to the cheapest later policy.
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
    """Whether stages that take at most `slowest_seconds` for a microbatch can hold all layers.

    The first of interleaved stages holds all leading layers, and in its other chunks layers of the main kinds.
    """
    first, leading = np.cumsum(degrees.pp) - degrees.pp, leading_layers(job)
    spare = (slowest_seconds - costs.send)[capacities.owner]
    spare = spare - np.where(capacities.is_last, costs.last[capacities.owner], 0.0)
    if leading:
        spare[first] -= leading * costs.layer[costs.num_main :].min(axis=(0, 1))
    apart = np.flatnonzero(degrees.mtp_before)
    spare[(first + degrees.pp - 2)[apart]] -= (costs.ends - costs.last)[apart]
    held = held_in_time(spare, costs.main[:, capacities.owner], capacities.layers)
    held[(first + degrees.pp - 1)[apart]] *= degrees.interleave[apart] > 1  # v = 1: the loss alone
    enough = capacities.in_all(held, degrees) >= num_main_layers(job) * (1 - 1e-9)
    if degrees.schedule == "interleaved" and leading:
        enough &= held[first] >= least_of_first_stage(job, degrees) - leading
    return np.asarray(enough)
