"""Schedules whose step is no sum over stages (zero-bubble and bidirectional ones): executed to be priced.

A configuration has one assignment: the even split, with the cheapest recompute policy that fits on each stage. The
order of each stage's passes is fixed, so that no pass that takes less makes the step longer: of even splits it is the
best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.estimate import estimate
from planner.cost.prices import num_microbatches
from planner.cost.schedule import steady_seconds
from planner.cost.stage import Pattern
from planner.search.bounds.even_splits import even_splits
from planner.search.bounds.of_layers import hides_exchanges
from planner.search.optimum.candidate import Candidate
from planner.search.optimum.pricing import layout_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.specs.job import PoolJob

_AT_ONCE: Final = 1e12


def busy_seconds(job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks) -> NDArray[np.float64]:
    """A step takes at least this long: the work of the slowest stage and the longest tail, [n].

    Infinite where the even split does not fit, or does not exist.

    Source: derived here; no schedule ends before its busiest stage. Tested to stay below the executed step.
    """
    split = even_splits(_without_network(job) if hides_exchanges(job, degrees) else job, degrees, policies)
    busy = steady_seconds(num_microbatches(job, degrees), split.slowest) + split.longest_tail
    return np.where(split.fits, busy, np.inf)


def _without_network(job: PoolJob) -> PoolJob:
    """The same job where communication takes next to nothing."""
    free = {"latency": 0.0, "startup": 0.0}
    links = tuple(
        link.model_copy(update={"bandwidth": _AT_ONCE * link.bandwidth, **free}) for link in job.cluster.links
    )
    return replace(job, cluster=job.cluster.model_copy(update={"links": links}))


def executed_candidates(job: PoolJob, degrees: DegreeArrays, policies: PolicyMasks) -> list[Candidate]:
    """Each configuration as a candidate with one column a stage, or none where it does not fit.

    The whole step is its constant: nothing is left to choose.
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
                load=layers,
                policy=policy,
                seconds=nothing,
                pass_seconds=nothing,
                slack_seconds=nothing,
                tail_seconds=nothing,
            )
        )
    return candidates
