"""Price zero-bubble and bidirectional schedules by executing them, because their step is not a sum over stages.

A configuration has one assignment: the even split, with the cheapest recompute policy that fits on each stage. The
order of each stage's passes is fixed, so a shorter pass never makes the step longer. The assignment is therefore the
best even split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.estimate import estimate
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import exchange_share
from planner.cost.schedule import steady_seconds
from planner.cost.stage import Pattern, pattern_of
from planner.search.bounds.even_splits import even_splits
from planner.search.bounds.of_layers import hides_exchanges
from planner.search.optimum.candidate import Candidate
from planner.search.optimum.pricing import layout_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.search.bounds.even_splits import EvenSplit
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.specs.job import PoolJob


def busy_seconds(job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks) -> NDArray[np.float64]:
    """Lower bound of the step in seconds, [n]: a stage's wait for its first input, its work, and the longest tail.

    The bound is infinite where the even split does not fit or does not exist.

    Source: derived here; no schedule ends before its busiest stage. Tested to stay below the executed step.
    """
    split = even_splits(job, degrees, policies)
    if hides_exchanges(job, degrees):
        split = _in_pairs(job, split)
    m = np.repeat(num_microbatches(job, degrees), degrees.pp)
    each = _waits_for_input(job, degrees, split) + steady_seconds(m, split.seconds)
    busy = np.maximum.reduceat(each, split.first) + split.longest_tail
    return np.where(split.fits, busy, np.inf)


def _in_pairs(job: PoolJob, split: EvenSplit) -> EvenSplit:
    """The split if all passes ran in pairs, so that C seconds of exchanges and W seconds of work take max(C, W + a C).

    Source: `planner.cost.simulate`.
    """
    exchange = split.exchange_seconds
    at_best = np.maximum(exchange, split.seconds - (1.0 - exchange_share(job)) * exchange)
    return replace(split, seconds=at_best, forward_seconds=np.maximum(0.0, split.forward_seconds - exchange))


def _waits_for_input(job: PoolJob, degrees: DegreeArrays, split: EvenSplit) -> NDArray[np.float64]:
    """Lower bound of the time until the first microbatch reaches each stage, for all stages end to end.

    The microbatch passes the first chunks of the previous stages, which hold at least as many layers as the other
    chunks. The first stage is left out, because the model's ends may be in its other chunk. The bound is zero for
    models with several kinds of layers, whose first chunks may be cheaper.
    """
    if pattern_of(job).num_states > 1:
        return np.zeros(len(split.forward_seconds))
    forward = split.forward_seconds / np.repeat(degrees.interleave, degrees.pp)
    forward[split.first] = 0.0
    before = np.cumsum(forward) - forward
    waits: NDArray[np.float64] = before - np.repeat(before[split.first], degrees.pp)
    return waits


def executed_candidates(job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks) -> list[Candidate]:
    """Each configuration as a candidate with one column per stage, or without columns if the even split does not fit.

    The whole step time is the candidate's constant, because no choice is left.
    """
    split = even_splits(job, degrees, policies)
    candidates = []
    for i, first in enumerate(split.first.tolist()):
        one, own = degrees.take(i), slice(first, first + degrees.pp[i] * bool(split.fits[i]))
        layers, policy = split.layers[own], split.policy[own]
        seconds = estimate(job, layout_at(one, layers.tolist(), policy.tolist())).step_seconds if len(layers) else 0.0
        nothing = np.zeros(len(layers))
        candidates.append(
            Candidate(
                name=f"tp={one.tp},pp={one.pp},dp={one.dp},zero={one.zero},mbs={one.mbs},schedule={one.schedule}",
                num_layers=job.model.num_layers,
                num_stages=one.pp,
                steady_count=0.0,
                constant_seconds=seconds,
                pattern=Pattern(),
                total_load=job.model.num_layers,
                stage=np.arange(len(layers)),
                start=np.zeros_like(layers),
                layers=layers,
                last=layers // one.interleave,
                load=layers,
                policy=policy,
                seconds=nothing,
                pass_seconds=nothing,
                slack_seconds=nothing,
                tail_seconds=nothing,
            )
        )
    return candidates
