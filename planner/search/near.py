"""Configurations that no bound has ruled out, and their candidates, shared by integer and dynamic program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.schedule import EXECUTED
from planner.search.optimum.executed_schedules import executed_candidates
from planner.search.optimum.pricing import price_candidates, with_steps_up_to
from planner.search.space.configurations import DegreeArrays
from planner.specs.uniform import uniform_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.numbers import FloatArray, IntArray, Rows
    from planner.search.objectives import Objective
    from planner.search.optimum.candidate import Candidate
    from planner.search.space.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """Configurations of one schedule and the lower bounds of their step time."""

    degrees: DegreeArrays
    seconds: FloatArray


class Near:
    """Configurations of several schedules, joined end to end, with their lower bounds and their candidates."""

    def __init__(self, space: Space, blocks: Sequence[Bounded]) -> None:
        self.space = space
        self._priced: dict[int, tuple[float, Candidate]] = {}  # with the longest step that its columns may have
        shared = [(each.degrees.schedule, each.degrees.offload) for each in blocks]
        self._shared = list(dict.fromkeys(shared))  # what all configurations of a block share
        numbers = [self._shared.index(each) for each in shared]
        self._which = np.repeat(np.array(numbers, dtype=np.int64), [len(each.seconds) for each in blocks])
        self._all = DegreeArrays.joined([each.degrees for each in blocks]) if blocks else None  # of all schedules
        self.seconds = np.concatenate([np.zeros(0), *(each.seconds for each in blocks)])  # lower bounds, [n]

    def __len__(self) -> int:
        """Number of configurations."""
        return len(self.seconds)

    def degrees(self, positions: Rows | int) -> DegreeArrays:
        """Degrees at `positions`, for callers that read only numbers: schedule and offload have no meaning."""
        assert self._all is not None, "there are none"
        return self._all.take(positions)

    def least(self, objective: Objective) -> float:
        """A lower bound of every layout of these configurations, as a sort key of the objective."""
        places = objective.rank(self.seconds, objective.devices(self.space.job, self.degrees(slice(None))))[0]
        return float(np.min(places))

    def one(self, position: int) -> DegreeArrays:
        """One configuration."""
        schedule, offload = self._shared[int(self._which[position])]
        return replace(self.degrees(position), schedule=schedule, offload=offload)

    def candidates(self, positions: IntArray, longest: FloatArray) -> list[Candidate]:
        """Configurations as candidates; a column that alone exceeds its position's longest step is left out.

        The integer program and the dynamic program share prices, so a configuration is usually priced once. It is
        priced again only if a caller allows longer steps than all earlier callers. So the cutoff of one method never
        removes columns that the other needs.
        longest: longest step of each position, [n].
        """
        found: dict[int, Candidate] = {}
        for number, (schedule, offload) in enumerate(self._shared):
            own = self._which[positions] == number
            here, limits = positions[own], longest[own]
            degrees = replace(self.degrees(here), schedule=schedule, offload=offload)
            before = [self._priced.get(position, (-np.inf, None))[0] for position in here.tolist()]
            new, known = np.flatnonzero(limits > before), np.flatnonzero(limits <= before)
            priced = candidates_of(self.space, degrees.take(new), limits[new]) if len(new) else []
            self._priced |= zip(here[new].tolist(), zip(limits[new].tolist(), priced, strict=True), strict=True)
            found |= zip(here[new].tolist(), priced, strict=True)
            others = [self._priced[position][1] for position in here[known].tolist()]
            narrowed = with_steps_up_to(self.space.job, degrees.take(known), others, limits[known])
            found |= zip(here[known].tolist(), narrowed, strict=True)
        return [found[position] for position in positions.tolist()]


def candidates_of(space: Space, degrees: DegreeArrays, cutoff_seconds: FloatArray) -> list[Candidate]:
    """Configurations of one schedule as candidates; a column that alone exceeds the cutoff is left out.

    cutoff_seconds: longest step of each configuration, [n].
    """
    policies = space.policies(degrees)
    if degrees.schedule in EXECUTED:
        return executed_candidates(uniform_job(space.job), degrees, policies)
    return price_candidates(space, degrees, policies, cutoff_seconds=cutoff_seconds)
