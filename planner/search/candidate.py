"""What the solvers see of a layout: numbers, and nothing of how they were priced.

A candidate is one outer configuration (degrees, ZeRO stage, microbatch size, interleave). What is still open in
it is how many layers each pipeline stage holds and how much of them it recomputes. Each way to fill one stage
that fits into memory is a column; a choice takes one column for each stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TIE", "Candidate", "Choice", "FloatArray", "IntArray", "Mask", "dominated"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

TIE = 1e-12
"""Step times that differ by less, relatively, are equal: it is what rounding does to a sum of stage times."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One outer configuration with the prices of its stages.

    The step time of a choice is (Narayanan et al. 2021, 2104.04473, section 2.2, for stages that differ)

        constant + steady_count * max_r seconds_r + sum_weight * sum_r seconds_r + max_r tail_seconds_r

    Columns are parallel arrays of one length, sorted by stage, then by layers.
    """

    name: str  # layout text, for messages
    num_layers: int  # layers of the model, to be spread over the stages
    num_stages: int
    steady_count: float  # m - 1/v: how often the slowest stage is waited for
    sum_weight: float  # 1/v: weight of one pass through all stages
    constant_seconds: float  # what does not depend on the split
    stage: IntArray  # 0 .. num_stages - 1
    layers: IntArray  # layers on that stage
    policy: IntArray  # index of the recompute policy
    seconds: FloatArray  # one microbatch through the stage, forward and backward
    tail_seconds: FloatArray  # exposed gradient reduction and optimizer step of the stage

    def __post_init__(self) -> None:
        lengths = {len(array) for array in (self.stage, self.layers, self.policy, self.seconds, self.tail_seconds)}
        assert len(lengths) == 1, f"{self.name}: columns of different lengths {lengths}"
        assert self.num_stages >= 1, f"{self.name}: no stage"
        order = self.stage * (self.num_layers + 1) + self.layers
        assert np.all(order[1:] >= order[:-1]), f"{self.name}: columns are not sorted by stage, then layers"
        assert np.all((self.stage >= 0) & (self.stage < self.num_stages)), f"{self.name}: a stage out of range"
        assert np.all((self.layers >= 0) & (self.layers <= self.num_layers)), f"{self.name}: layers out of range"
        prices = np.concatenate([self.seconds, self.tail_seconds])
        prices = np.append(prices, [self.steady_count, self.sum_weight, self.constant_seconds])
        assert np.all(np.isfinite(prices) & (prices >= 0)), f"{self.name}: a price is negative or not finite"

    @property
    def num_columns(self) -> int:
        """Ways to fill a stage, over all stages."""
        return len(self.stage)

    def keep(self, mask: Mask) -> Candidate:
        """The same candidate with only the columns where `mask` is true."""
        columns = ("stage", "layers", "policy", "seconds", "tail_seconds")
        return replace(self, **{name: getattr(self, name)[mask] for name in columns})

    def weighted(self, factor: float) -> Candidate:
        """The same candidate with every price multiplied by `factor`."""
        return replace(
            self,
            constant_seconds=self.constant_seconds * factor,
            seconds=self.seconds * factor,
            tail_seconds=self.tail_seconds * factor,
        )

    def step_seconds(self, columns: Sequence[int] | IntArray) -> float:
        """Step time of a choice: one column index for each stage, in stage order."""
        chosen = np.asarray(columns)
        seconds = self.seconds[chosen]
        steady = self.steady_count * float(seconds.max())
        total = self.sum_weight * float(seconds.sum())
        return self.constant_seconds + steady + total + float(self.tail_seconds[chosen].max())

    def is_choice(self, columns: Sequence[int] | IntArray) -> bool:
        """Whether these columns are one for each stage, in stage order, and hold every layer once."""
        chosen, stages = np.asarray(columns, dtype=np.int64), np.arange(self.num_stages)
        return np.array_equal(self.stage[chosen], stages) and int(self.layers[chosen].sum()) == self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One column for each stage of one candidate."""

    candidate: int  # index in the list of candidates
    columns: tuple[int, ...]  # column indices of that candidate, one for each stage
    objective_seconds: float  # step time


def dominated(candidate: Candidate) -> Mask:
    """Columns that no optimum needs: another one of the same stage and layers is no worse in both prices.

    Of columns that are equal in both prices the first stays.
    """
    order = np.lexsort((candidate.tail_seconds, candidate.seconds, candidate.layers, candidate.stage))
    stage, layers, tail = candidate.stage[order], candidate.layers[order], candidate.tail_seconds[order]
    new_group = np.append(True, (np.diff(stage) != 0) | (np.diff(layers) != 0))[: len(order)]
    group = np.cumsum(new_group) - 1
    place = np.arange(len(order)) - np.flatnonzero(new_group)[group]  # 0 for the fastest of its group
    shortest_tail = np.full(int(group[-1]) + 1 if len(group) else 0, np.inf)
    mask = np.zeros(candidate.num_columns, dtype=np.bool_)
    for rank in range(int(place.max(initial=-1)) + 1):
        here = np.flatnonzero(place == rank)
        worse = tail[here] >= shortest_tail[group[here]]
        mask[order[here[worse]]] = True
        shortest_tail[group[here]] = np.minimum(shortest_tail[group[here]], tail[here])
    return mask
