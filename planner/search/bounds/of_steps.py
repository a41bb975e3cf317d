"""Lower bounds of a configuration's step time, before its stages are priced one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner.cost.microbatch import num_microbatches
from planner.cost.prices import stage_fits, stage_prices
from planner.cost.schedule import steady_count, step_seconds
from planner.cost.stage import stage_of
from planner.layout import offloads_activations
from planner.search.bounds.least_costs import least_costs, least_transfer
from planner.search.bounds.of_layers import (
    kinds_main_first,
    layer_shapes,
    layers_of_slowest,
    leading_layers,
    num_main_layers,
)
from planner.search.bounds.of_memory import capacities_of_stages, held_in_time
from planner.search.space.degree_rules import least_of_first_stage, searched_ends
from planner.search.space.policies import choices_of
from planner.specs.recompute import NONE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.numbers import Number, Rows
    from planner.search.bounds.least_costs import LeastCosts
    from planner.search.bounds.of_memory import Capacities
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.specs.job import PoolJob

LONG = 1e30  # seconds; longer than anything, and finite


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
    prediction. The degrees have one replica, which needs least memory and optimizer work, and the bound leaves out
    traffic between data-parallel ranks.

    A stage with k layers takes at least k rho + send, where rho is the price of a layer in a stage with the most layers
    (`least_costs`). The sum over the stages, plus the last stage's work outside its layers, is all work. Three values
    bound the slowest of S stages from below: the mean of all work, the time of ceil(L / S) layers, and the time of one
    layer per chunk and the head. Then T >= (m - 1/v) * slowest + all work / v + the tail of a stage of ceil(L / S)
    layers. Configurations whose bound stays within the cutoff get a second bound, with the recompute that their memory
    requires.

    Gain (`step`): 7.41 -> 0.46 s for GPT-3 on 1,024 devices, over 15 -> 1.46 for DeepSeek-V3 on 11,000.

    Source: derived here; tested to stay below the exact optimum.
    """
    if not len(degrees):
        return np.zeros(0)
    bounds = np.full(len(degrees), np.inf)
    alone, piped = np.flatnonzero(degrees.pp == 1), np.flatnonzero(degrees.pp > 1)
    if len(alone):
        bounds[alone] = single_stage_seconds(job, degrees.take(alone), masks_of(policies, alone), any_replicas)
    if len(piped):
        left = degrees.take(piped)
        cutoff = np.broadcast_to(cutoff_seconds, (len(degrees),))
        costs = least_costs(job, left, masks_of(policies, piped), cutoff[piped], any_replicas)
        bounds[piped] = _least_step(job, left, costs, 0.0)
        near = bounds[piped] <= cutoff[piped]
        if not near.any():
            return bounds
        piped = piped[near]
        chosen = masks_of(policies, piped)
        bounds[piped] = _bound_by_memory(job, degrees.take(piped), costs.take(near), chosen, cutoff[piped])
    return bounds


def replicas_bound_seconds(
    job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks, cutoff_seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Lower bound of a step from prices that hold for any replicas, and from the traffic of each number of replicas.

    Configurations that differ only in replicas, and in the place of multi-token prediction, share these prices but for
    the traffic, so the prices are computed once. They hold for each of the configurations (`lower_bound_seconds`), and
    so does the traffic (`least_transfer`), which only the longest tail contains. Without a pipeline the bound is 0.

    Gain (`replicas`, once on a busy machine): 24.6 -> 16.6 s for DeepSeek-V3 on 100,000 devices.

    Source: derived here; tested to stay below the exact optimum.
    """
    bounds, piped = np.zeros(len(degrees)), np.flatnonzero(degrees.pp > 1)
    if len(piped):
        left, cutoff = degrees.take(piped), np.broadcast_to(cutoff_seconds, (len(degrees),))[piped]
        alike, position = left.distinct(*(key for key in left.numbers() if key not in ("hsdp", "mtp_before")))
        allowed = {
            policy: np.bincount(position, weights=mask) > 0 for policy, mask in masks_of(policies, piped).items()
        }
        shared = np.zeros(len(alike))
        np.maximum.at(shared, position, cutoff)
        costs = least_costs(job, alike, allowed, shared, any_replicas=True)
        more = least_transfer(job, left, costs.take(position)) - costs.tail[position]
        bounds[piped] = _least_step(job, alike, costs, 0.0)[position] + np.maximum(more, 0.0)
    return bounds


def least_seconds_of_any_policy(job: PoolJob, degrees: DegreeArrays, cutoff_seconds: Number) -> NDArray[np.float64]:
    """Lower bound of the step of each configuration under every recompute policy and number of replicas.

    This is the bound of `lower_bound_seconds` without recompute and without memory limits. The bound holds for every
    policy, because recompute hides at most as many seconds of traffic as it adds in computing. The bound is 0 if
    activations are offloaded, because recompute then spares copies to the host.

    Gain (`any-policy`, busy machine): 2.7 -> 2.2 s for DeepSeek-V3 on 2,048 devices with five policies.

    Source: derived here; tested to stay below the exact optimum.
    """
    bounds, nothing = np.zeros(len(degrees)), {NONE: np.ones(len(degrees), dtype=bool)}
    piped = np.flatnonzero((degrees.pp > 1) & (not offloads_activations(degrees)))
    if len(piped):
        left = degrees.take(piped)
        cutoff = np.broadcast_to(cutoff_seconds, (len(degrees),))[piped]
        left = left.having("recompute", np.full(len(left), NONE))
        costs = least_costs(job, left, masks_of(nothing, piped), cutoff, any_replicas=True)
        bounds[piped] = _least_step(job, left, costs, 0.0)
    return bounds


def masks_of(policies: PolicyMasks, index: Rows) -> PolicyMasks:
    """The masks of some of the configurations."""
    return {policy: mask[index] for policy, mask in policies.items()}


def single_stage_seconds(
    job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks, any_replicas: bool
) -> NDArray[np.float64]:
    """The exact step time of configurations without a pipeline: their only stage holds all layers."""
    choices = choices_of(degrees, policies)
    stage = stage_of(job, index=np.zeros_like(degrees.pp), num_layers=job.model.num_layers, policy=choices.policy)
    prices = stage_prices(job, degrees, stage, layer_shapes(job, degrees).of_each())
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

    Gain (`memory-phase`): 1.98 -> 0.68 s for GPT-3 on 1,024 devices; none for DeepSeek-V3 on 11,000.
    """
    capacities = capacities_of_stages(job, degrees, policies)
    forced = _forced_seconds(job, degrees, costs, capacities)
    bounds = _least_step(job, degrees, costs, forced)
    steady = steady_count(num_microbatches(job, degrees), degrees.interleave)
    possible = np.isfinite(bounds)
    slowest = np.where(possible, _least_slowest(job, degrees, costs, forced), 0.0)
    rest = np.where(possible, bounds, 0.0) - steady * slowest
    most = (cutoff_seconds - rest) / np.maximum(steady, 1e-9)
    held = _holds_in_time(job, degrees, costs, capacities, np.where(np.isfinite(most), most, LONG))
    return np.where(held, bounds, np.inf)


def _least_work(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> Number:
    """Least seconds of one microbatch in all stages together."""
    counts = np.array([kind.number for kind in kinds_main_first(job)])[:, np.newaxis]
    layers = (counts * costs.layer.min(axis=1)).sum(axis=0)
    return layers + degrees.pp * costs.send + costs.ends + forced_seconds


def _least_slowest(job: PoolJob, degrees: DegreeArrays, costs: LeastCosts, forced_seconds: Number) -> Number:
    """Least seconds of one microbatch in the slowest stage, [n].

    The slowest stage has at least the mean of all work. Stages hold whole layers, which gives two further bounds
    (`layers_of_slowest`). The first prices all layers like the fastest kind, and the second prices only the layers of
    the main kinds.

    Gain (`whole-layers`, busy machine): 8.5 -> 7.3 s for DeepSeek-V3 on 100,000 devices.
    """
    layer, main = costs.layer.min(axis=(0, 1)), costs.main.min(axis=0)
    alone = searched_ends(job) > 0  # the last chunk may hold the loss without a layer
    fullest = (degrees.interleave - alone) * layer + costs.last
    # behind multi-token prediction in a stage of its own the last stage holds the loss and nothing else
    before, apart = (degrees.mtp_before > 0) & (degrees.interleave == 1), costs.ends - costs.last
    stages, further = degrees.pp - before, np.where(before, apart, costs.last)
    apart = np.where(~before & (degrees.mtp_before > 0) & (degrees.pp > 2), apart, 0.0)  # of two, on the first stage
    leading = leading_layers(job) if degrees.schedule == "interleaved" else 0
    first = leading * costs.layer[costs.num_main :].min(axis=(0, 1)) if leading else 0.0
    for seconds, count, ends in (
        (layer, job.model.num_layers, (further, apart)),
        (main, num_main_layers(job), (further, apart, first)),
    ):
        fullest = np.maximum(fullest, seconds * layers_of_slowest(count, stages, [end / seconds for end in ends]))
    return np.maximum(_least_work(job, degrees, costs, forced_seconds) / degrees.pp, fullest + costs.send)


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
