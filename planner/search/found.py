"""What the best-first search found: layouts, configurations that no bound ruled out, and counts of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from planner.search.near import Near
from planner.search.optimum.candidate import Disagreement
from planner.search.optimum.pricing import layout_at
from planner.search.space.arrays import AGREEMENT
from planner.search.space.placements import pools_of_stages
from planner.search.space.rules import RULES

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.search.optimum.candidate import Candidate, Choice
    from planner.search.space.configurations import DegreeArrays, Refusals
    from planner.search.space.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """One configuration (its degrees are plain integers) with layers and recompute policy for each stage."""

    degrees: DegreeArrays
    layers: tuple[int, ...]
    last: tuple[int, ...]  # layers of each stage's last chunk
    policies: tuple[int, ...]
    seconds: float = field(compare=False)  # of a step


class Found:
    """The dynamic program's layouts, the integer program's configurations, and counts of ruled-out configurations."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.layouts: list[Assigned] = []  # the best layout of each configuration, by the dynamic program
        self.near = Near(space, ())  # configurations that no bound has ruled out
        self.num_cuts = 0  # legal partitions of the devices
        self.num_cuts_pruned = 0  # partitions ruled out by a bound before anything else was filled in
        self.num_legal = 0  # legal configurations, counted as far as they were filled in
        self.num_priced = 0
        self.most_devices = 0  # the most devices that a legal partition uses
        self.pruned = {"memory": 0, "time bound": 0}
        self.refused: Refusals = {}
        self.narrowed: set[str] = set()  # rules that leave out some splits of the layers of configurations
        self.is_out_of_time = False
        self.bound: float | None = None  # lower bound of all layouts, in the objective's order; None: complete

    def drop(self, reason: str, count: int) -> None:
        """Count configurations that a bound has ruled out."""
        self.num_legal += count
        self.pruned[reason] = self.pruned.get(reason, 0) + count

    @property
    def not_searched(self) -> tuple[str, ...]:
        """Layouts that rules of the search left out and no bound ruled out before, in words."""
        return tuple(
            rule.left_out
            for rule in RULES
            if rule.left_out and (self.refused.get(rule.name) or rule.name in self.narrowed)
        )

    def layout_of(self, assigned: Assigned) -> Layout:
        """The layout, with each stage's pool."""
        return layout_at(
            assigned.degrees,
            assigned.layers,
            assigned.policies,
            pools_of_stages(self.space.job, assigned.degrees),
            assigned.last,
        )


def assigned_by(degrees: DegreeArrays, candidate: Candidate, choice: Choice) -> Assigned:
    """The configuration with the layers and policies of a choice, and its step time by the candidate's prices.

    Raises:
        Disagreement: the choice does not place every layer, or its stated step time differs from the priced one.
    """
    columns = list(choice.columns)
    seconds = candidate.step_seconds(columns) if candidate.is_choice(columns) else np.nan
    if not abs(seconds - choice.objective_seconds) <= AGREEMENT * seconds:
        raise Disagreement(f"{candidate.name}: {choice} is no assignment of it, or takes {seconds!r} s")
    layers, last, policies = (
        tuple(values[columns].tolist()) for values in (candidate.layers, candidate.last, candidate.policy)
    )
    return Assigned(degrees=degrees, layers=layers, last=last, policies=policies, seconds=seconds)
