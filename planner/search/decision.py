"""The integer program's decision, and the check that the dynamic program agrees with it.

The integer program answers before any result of the dynamic program is read. Configurations are read, lowest bound
first, until a bound exceeds the incumbent, which is the best greedy assignment so far. The integer program therefore
includes every configuration whose lower bound is at most its own answer. The two methods share legal configurations,
prices and lower bounds (`near`). In the end they must agree, and no assignment that was tried before may be better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.errors import SolverTrouble
from planner.search.optimum.candidate import Candidate, Disagreement
from planner.search.optimum.certificate import INTERRUPTED, OUT_OF_TIME, Solution, solve
from planner.search.optimum.pruning import incumbent, lower_bounds
from planner.search.space.arrays import AGREEMENT, TIE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.numbers import FloatArray, IntArray
    from planner.search.found import Assigned, Found
    from planner.search.near import Near
    from planner.search.objectives import BestKinds, Objective, Rank
    from planner.search.optimum.integer_program import SolverName
    from planner.search.space.configurations import DegreeArrays

_FIRST: Final = 16  # configurations priced at first; each further round prices twice as many
_MOST: Final = 256
_MARGIN: Final = 1e-6
"""Configurations worse than the incumbent by at most this share are kept as well, so that rounding excludes none."""


def rank_of(found: Found, objective: Objective, assigned: Assigned) -> Rank:
    """The rank of a layout by an objective."""
    return _rank_at(objective, assigned.seconds, objective.devices(found.space.job, assigned.degrees))


def _rank_at(objective: Objective, seconds: float, devices: float) -> Rank:
    first, second = objective.rank(seconds, devices)
    return float(first), float(second)


def best_layout(found: Found, objective: Objective, layouts: Sequence[Assigned] = ()) -> Assigned:
    """The best of some layouts that the dynamic program found, by default of all (`fastest_of`)."""
    layouts = layouts or found.layouts
    return fastest_of(layouts, [rank_of(found, objective, each) for each in layouts])


def fastest_of(layouts: Sequence[Assigned], ranks: Sequence[Rank]) -> Assigned:
    """The layout of the least rank; of several within `TIE`, one in whose smallest stage most layers are.

    If that does not decide either, it is the first by its numbers, so that the answer depends on no order of search.
    """
    first, second = (value * (1 + TIE) for value in min(ranks))
    tied = [each for each, rank in zip(layouts, ranks, strict=True) if rank[0] <= first and rank[1] <= second]
    return min(tied, key=lambda each: (-min(each.layers), *each.degrees.numbers().values(), each.layers, each.policies))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The integer program's answer, the number of its configurations, and the rank of its best layout, if there is one.

    gap: share by which the dynamic program's best layout may exceed the bound that the integer program proved.
    """

    solution: Solution
    num_decided: int = 0
    rank: Rank = (math.inf, math.inf)
    gap: float = 0.0


def _of_program(found: Found, objective: Objective, solver: SolverName, time_limit: float | None) -> Decision:
    """The integer program's answer over all configurations whose lower bounds do not exceed its own incumbent."""
    num_decided, solution = 0, solve([], solver=solver)
    for group in contenders(found.near, objective):
        num_decided += len(group)
        candidates = [each.candidate for each in group]
        solution = solve(candidates, solver=solver, time_limit=time_limit)
        if solution.choice is not None:
            chosen = group[solution.choice.candidate]
            devices = objective.devices(found.space.job, chosen.degrees)
            seconds = solution.objective_seconds / objective.weight(devices)
            rank = _rank_at(objective, seconds, devices)
            return Decision(solution=solution, num_decided=num_decided, rank=rank, gap=solution.gap)
    return Decision(solution=solution, num_decided=num_decided)


def _by_dynamic_program(found: Found, objective: Objective) -> Rank:
    """The rank of the dynamic program's best layout; infinite without one."""
    return rank_of(found, objective, best_layout(found, objective)) if found.layouts else (math.inf, math.inf)


def _checked(found: Found, best: BestKinds, decision: Decision) -> Decision:
    """The decision, after a check that the two methods agree and that no layout tried on the way is better.

    The check also shows that no cutoff that ruled out a configuration was below the integer program's answer.

    Raises:
        Disagreement: the methods found different optima, or a layout that was tried on the way is better than both.
    """
    objective, theirs = best.objective, _by_dynamic_program(found, best.objective)
    said = f"by {objective.name} the integer program's best is {decision.rank}, the dynamic program's {theirs}"
    if _before(best.first, theirs):
        raise Disagreement(f"{said}, and a layout was tried that has {best.first}")
    if decision.solution.status == "time limit":
        proved = decision.rank[0] * (1 - decision.gap)
        if theirs[0] < proved * (1 - AGREEMENT):
            raise Disagreement(f"{said}, and the integer program proved {proved}")
        return replace(decision, rank=theirs, gap=max(0.0, 1 - proved / theirs[0]))
    if _before(theirs, decision.rank) or _before(decision.rank, theirs):
        raise Disagreement(said)
    return decision


def _before(one: Rank, other: Rank) -> bool:
    """Whether one rank is better than the other by more than rounding."""
    if abs(one[0] - other[0]) <= AGREEMENT * abs(other[0]):
        return one[1] < other[1] * (1 - AGREEMENT)
    return one[0] < other[0]


def decide(found: Found, best: BestKinds, solver: SolverName, time_limit: float | None) -> Decision:
    """The integer program's answer, after a check that the dynamic program agrees (`_checked`).

    If the solver failed, the dynamic program decides alone. After Ctrl-C the answer is the best known layout with its
    gap to a lower bound, and its status is never "optimal".

    Raises:
        Disagreement: as `_checked` says.
    """
    objective, bound = best.objective, found.bound
    try:
        if bound is None:
            return _checked(found, best, _of_program(found, objective, solver, time_limit))
    except SolverTrouble as trouble:
        warnings = (f"{solver} failed, so the dynamic program decided alone: {trouble}",)
        solution = replace(INTERRUPTED, status="optimal" if found.layouts else "infeasible", gap=0.0, warnings=warnings)
        rank = _by_dynamic_program(found, objective)
        return _checked(found, best, Decision(solution=solution, num_decided=len(found.near), rank=rank))
    except KeyboardInterrupt:
        if not found.layouts:
            raise
        bound = found.near.least(objective)
    rank = _by_dynamic_program(found, objective)
    solution = OUT_OF_TIME if found.is_out_of_time else INTERRUPTED
    return Decision(solution=solution, rank=rank, gap=1 - min(bound, rank[0]) / rank[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One configuration and its candidate, whose seconds are weighted by the objective (`Objective.weight`)."""

    degrees: DegreeArrays
    candidate: Candidate


def contenders(near: Near, objective: Objective) -> Iterator[list[Contender]]:
    """Groups of contenders, best group first: no contender is better than a contender of an earlier group.

    The objective `gpus` has one group for each world size, fewest devices first, so the first group with any choice
    has the best choice. Other objectives have one group.
    """
    if not len(near):
        return
    everything = near.degrees(slice(None))
    devices = np.broadcast_to(objective.devices(near.space.job, everything), near.seconds.shape)
    groups = [devices == count for count in np.unique(devices)] if objective.name == "gpus" else [devices >= 0]
    weights = np.array([objective.weight(count) for count in devices.tolist()])
    longest = np.broadcast_to(objective.longest_seconds(devices), devices.shape)
    for group in groups:
        yield _of_group(near, weights, longest, np.flatnonzero(group))


def _of_group(near: Near, weights: FloatArray, longest_seconds: FloatArray, group: IntArray) -> list[Contender]:
    bounds = near.seconds * weights
    group = group[near.seconds[group] <= longest_seconds[group] * (1 + TIE)]
    order, first, size = group[np.argsort(bounds[group], kind="stable")], 0, _FIRST
    limit, found = np.inf, list[tuple[float, int, Candidate]]()
    while first < len(order) and bounds[order[first]] <= limit:
        part = order[first : first + size]
        part = part[bounds[part] <= limit]
        priced = near.candidates(part, np.minimum(limit / weights[part], longest_seconds[part]))
        of_each = zip(priced, weights[part], longest_seconds[part] * weights[part], strict=True)
        weighted = [each.weighted(weight, longest) for each, weight, longest in of_each]
        lower = lower_bounds(weighted).candidate
        known = incumbent(weighted, lower)
        if known is not None:
            limit = min(limit, known.objective_seconds * (1 + _MARGIN))
        found += [
            (bound, at, each)
            for at, each, bound in zip(part.tolist(), weighted, lower.tolist(), strict=True)
            if bound <= limit and bound < np.inf
        ]
        first, size = first + size, min(2 * size, _MOST)
    return [Contender(degrees=near.one(at), candidate=each) for bound, at, each in found if bound <= limit]
