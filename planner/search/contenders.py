"""The configurations on which the integer program decides: all that may beat its own incumbent.

Nothing that the dynamic program found is read here. Configurations come in the order of their lower bounds, are priced
anew, and are taken until a bound exceeds the best layout that this module knows: the integer program's answer for the
first of them, and greedy fillings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.search.best_first import candidates_of
from planner.search.bounds import incumbent, lower_bounds
from planner.search.candidate import TIE, Candidate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.search.best_first import Near
    from planner.search.candidate import FloatArray, IntArray
    from planner.search.constraints import Constraints
    from planner.search.degrees import DegreeArrays
    from planner.search.objectives import Objective
    from planner.specs.job import Job

_FIRST: Final = 16  # configurations that are priced at first; then twice as many each time
_MOST: Final = 256
_MARGIN: Final = 1e-6
"""What comes within this share of the incumbent is taken too, so that rounding leaves nothing out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One configuration, and the same as numbers; its seconds count by the objective (`Objective.weight`)."""

    degrees: DegreeArrays
    candidate: Candidate


def contenders(job: Job, constraints: Constraints, near: Near, objective: Objective) -> Iterator[list[Contender]]:
    """Groups of contenders, those before which none of a later group comes: one group, or one for each world size.

    `gpus` asks for few devices first, so that the first group with any choice has the best.
    """
    if not len(near):
        return
    everything = near.degrees(slice(None))
    devices = np.broadcast_to(objective.devices(job, everything), near.seconds.shape)
    groups = [devices == count for count in np.unique(devices)] if objective.name == "gpus" else [devices >= 0]
    weights = np.array([objective.weight(count) for count in devices.tolist()])
    for group in groups:
        yield _of_group(job, constraints, near, weights, objective.longest_step_seconds, np.flatnonzero(group))


def _of_group(
    job: Job, constraints: Constraints, near: Near, weights: FloatArray, longest_seconds: float, group: IntArray
) -> list[Contender]:
    bounds = near.seconds * weights
    group = group[near.seconds[group] <= longest_seconds * (1 + TIE)]
    order, first, size = group[np.argsort(bounds[group], kind="stable")], 0, _FIRST
    limit, found = np.inf, list[tuple[float, Contender]]()
    while first < len(order) and bounds[order[first]] <= limit:
        part = order[first : first + size]
        part = part[bounds[part] <= limit]
        cutoff = np.minimum(limit / weights[part], longest_seconds)
        priced = _priced(job, constraints, near, part, cutoff)
        weighted = [
            replace(each.weighted(weights[at]), longest_seconds=longest_seconds * weights[at])
            for at, each in zip(part.tolist(), priced, strict=True)
        ]
        lower = lower_bounds(weighted).candidate
        known = incumbent(weighted, lower)
        if known is not None:
            limit = min(limit, known.objective_seconds * (1 + _MARGIN))
        found += [
            (bound, Contender(degrees=near.one(at), candidate=each))
            for at, each, bound in zip(part.tolist(), weighted, lower.tolist(), strict=True)
            if bound <= limit and bound < np.inf
        ]
        first, size = first + size, min(2 * size, _MOST)
    return [each for bound, each in found if bound <= limit]


def _priced(
    job: Job, constraints: Constraints, near: Near, positions: IntArray, cutoff_seconds: FloatArray
) -> list[Candidate]:
    """The configurations at these positions as candidates, in their order."""
    found: dict[int, Candidate] = {}
    for here, degrees in near.alike(positions):
        cutoff = cutoff_seconds[np.isin(positions, here)]
        found |= zip(here.tolist(), candidates_of(job, constraints, degrees, cutoff), strict=True)
    return [found[position] for position in positions.tolist()]
