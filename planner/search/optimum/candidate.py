"""Candidates: all that the solvers read about a configuration, in numbers, without the cost model behind them.

A candidate is one outer configuration (degrees, ZeRO stage, microbatch size, interleave). A candidate leaves open how
many layers each pipeline stage holds and which recompute policy the stage uses. A column is one way to fill one stage:
a number of layers and a policy that fit into memory. A choice has one column for each stage.

If layers differ, the price of a stage depends on which layers it holds. The kinds of layers follow a pattern
(`Pattern`). The state of a position in this pattern tells which kinds of layers come next, so a column is valid for all
positions with one state. A stage uses the columns of the state that the previous stage ends at.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.search.space.arrays import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.cost.stage import Pattern
    from planner.numbers import FloatArray, IntArray, Mask


class Disagreement(AssertionError):
    """Two methods found different optima, or a layout beats both optima. This is a bug; the message has the values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One outer configuration with the prices of its stages.

    The step time of a choice is (Narayanan et al. 2021, 2104.04473, section 2.2, for stages that differ)

        constant + steady_count * bottleneck + sum_r pass_seconds_r + max_r tail_seconds_r
        bottleneck = max_r (seconds_r + max(0, h - slack_seconds_r))

    where h, the slack_seconds of the last stage, is the time of the model's last chunk. A stage whose slack is shorter
    than h waits for that chunk. Slack and h are 0 if stages have one chunk. Columns are parallel arrays of one length,
    sorted by stage, then by layers.

    Loads are layers weighted by kind, with arbitrary whole weights. The loads of a choice add up to `total_load`, which
    lower bounds use.
    """

    name: str  # layout text, for messages
    num_layers: int  # layers of the model, to be spread over the stages
    num_stages: int
    steady_count: float  # m - 1/v: how many times the step includes the slowest stage's time
    constant_seconds: float  # the part of the step that does not depend on the split
    longest_seconds: float = np.inf  # the deadline: choices with longer steps are not allowed
    pattern: Pattern  # order of the kinds of layers, if it decides which columns may follow a column
    total_load: int  # load of all layers
    stage: IntArray  # 0 .. num_stages - 1
    start: IntArray  # state in which the layers of the column begin
    layers: IntArray  # layers on that stage
    last: IntArray  # layers of the stage's last chunk
    load: IntArray  # load of these layers
    policy: IntArray  # index of the recompute policy
    seconds: FloatArray  # one microbatch through the stage, forward and backward
    pass_seconds: FloatArray  # time that the stage adds to filling and draining; equal to `seconds` with one chunk
    slack_seconds: FloatArray  # how long the last chunk may take before the stage waits for it
    tail_seconds: FloatArray  # exposed gradient reduction and optimizer step of the stage

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in _COLUMNS}
        assert len(lengths) == 1, f"{self.name}: columns of different lengths {lengths}"
        assert self.num_stages >= 1, f"{self.name}: no stage"
        order = self.stage * (self.num_layers + 1) + self.layers
        assert np.all(order[1:] >= order[:-1]), f"{self.name}: columns are not sorted by stage, then layers"
        assert np.all((self.stage >= 0) & (self.stage < self.num_stages)), f"{self.name}: a stage out of range"
        assert np.all((self.layers >= 0) & (self.layers <= self.num_layers)), f"{self.name}: layers out of range"
        assert np.all((self.start >= 0) & (self.start < self.pattern.num_states)), f"{self.name}: no such state"
        assert np.all(self.start[self.stage == 0] == 0), f"{self.name}: the first stage begins with the first layer"
        prices = np.concatenate([getattr(self, name) for name in _PRICES])
        prices = np.append(prices, [self.steady_count, self.constant_seconds])
        assert np.all(np.isfinite(prices) & (prices >= 0)), f"{self.name}: a price is negative or not finite"

    @property
    def num_columns(self) -> int:
        """Number of ways to fill a stage, summed over the stages."""
        return len(self.stage)

    def keep(self, columns: Mask | IntArray) -> Candidate:
        """The same candidate with only these columns: a mask, or positions in ascending order."""
        return self._with({name: getattr(self, name)[columns] for name in _COLUMNS})

    def weighted(self, factor: float, longest_seconds: float) -> Candidate:
        """The same candidate with every price multiplied by `factor`, and the deadline `longest_seconds`."""
        prices = {name: getattr(self, name) * factor for name in ("constant_seconds", *_PRICES)}
        return self._with({**prices, "longest_seconds": longest_seconds})

    def _with(self, values: dict[str, Any]) -> Candidate:
        """The same candidate with other values of some fields.

        The columns are not checked again, because the check took a tenth of a search on several pools.
        """
        changed = object.__new__(Candidate)
        for name in _FIELDS:
            object.__setattr__(changed, name, values[name] if name in values else getattr(self, name))
        return changed

    def step_seconds(self, columns: Sequence[int] | IntArray) -> float:
        """Step time of a choice: one column index for each stage, in stage order."""
        chosen = np.asarray(columns)
        slack = self.slack_seconds[chosen]
        steady = self.steady_count * float((self.seconds[chosen] + np.maximum(0.0, slack[-1] - slack)).max())
        total = float(self.pass_seconds[chosen].sum())
        return self.constant_seconds + steady + total + float(self.tail_seconds[chosen].max())

    def is_choice(self, columns: Sequence[int] | IntArray) -> bool:
        """Whether the columns form a choice: one per stage, in order, with every layer once, within the deadline."""
        chosen, stages = np.asarray(columns, dtype=np.int64), np.arange(self.num_stages)
        if not np.array_equal(self.stage[chosen], stages) or int(self.layers[chosen].sum()) != self.num_layers:
            return False
        before = np.cumsum(self.layers[chosen]) - self.layers[chosen]
        in_time = self.step_seconds(chosen) <= self.longest_seconds * (1 + AGREEMENT)
        return in_time and np.array_equal(self.start[chosen], self.pattern.state(before))


_PRICES = ("seconds", "pass_seconds", "slack_seconds", "tail_seconds")
_COLUMNS = ("stage", "start", "layers", "last", "load", "policy", *_PRICES)
_FIELDS = tuple(field.name for field in fields(Candidate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One column for each stage of one candidate."""

    candidate: int  # index in the list of candidates
    columns: tuple[int, ...]  # column indices of that candidate, one for each stage
    objective_seconds: float  # step time


def dominated(candidate: Candidate) -> Mask:
    """Columns that no optimum needs: another of the same stage, state and layers is at least as good in every price.

    More slack is better, except on the last stage, whose slack is the time of its last chunk. Of columns that are equal
    in all prices the first one is kept.
    """
    last = candidate.stage == candidate.num_stages - 1
    slack = np.where(last, candidate.slack_seconds, -candidate.slack_seconds)
    prices = np.stack([candidate.seconds, candidate.pass_seconds, candidate.tail_seconds, slack])
    key = candidate.stage * (candidate.num_layers + 1) + candidate.layers
    key = key * candidate.pattern.num_states + candidate.start
    order = np.lexsort((*prices[::-1], key))
    key = key[order]
    prices = prices[:, order]
    worse = np.zeros(candidate.num_columns, dtype=np.bool_)
    for distance in range(1, int(np.unique(key, return_counts=True)[1].max(initial=1))):
        before = prices[:, :-distance]
        no_better = (before <= prices[:, distance:]).all(axis=0)
        worse[distance:] |= no_better & (key[distance:] == key[:-distance])
    mask = np.zeros_like(worse)
    mask[order] = worse
    return mask
