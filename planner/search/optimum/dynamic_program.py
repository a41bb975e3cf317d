"""The exact optimum without an integer program: the second method of the search.

The module imports neither `integer_program` nor `pruning`; its input is candidates. In the search, lower bounds have
already ruled out other configurations, and `pruning.prune` has dropped columns of these candidates. The integer program
uses the same lower bounds but not `prune`.

The time of the model's last chunk depends on the column of the last stage. Each possible time gives one variant
(`_variants`), in which the seconds of each column are known, with its wait for the last chunk. For one variant let G(a,
b) be the least sum of pass seconds over the choices whose bottleneck is at most `a` and whose longest tail is at most
`b`. The optimum is

    min over (a, b) of   constant + steady_count * a + G(a, b) + b

because at the (a, b) of an optimal choice this value is the choice's step time, and at every (a, b) the value is at
least the step time of the choice that attains G(a, b). G does not increase in either argument, so on a box [a0, a1] x
[b0, b1]

    constant + steady_count * a0 + G(a1, b1) + b0

is a lower bound of every choice in the box. `_Scan` halves boxes until none can hold a better choice. G itself is a
dynamic program over (stage, layers left). The number of layers left determines where the stage begins, and therefore
its allowed columns.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from planner.search.optimum.candidate import Candidate, Choice
from planner.search.space.arrays import TIE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.cost.stage import Pattern
    from planner.numbers import FloatArray, IntArray, Mask


def best_choice(candidate: Candidate, *, cutoff: float = np.inf) -> Choice | None:
    """The optimum of one candidate, or None if no choice takes at most `cutoff` seconds.

    Among choices of equal step time (within `TIE`) the one with the lexicographically smallest layers is returned, so
    equal inputs give equal answers.
    """
    cutoff = min(cutoff, candidate.longest_seconds * (1 + TIE))
    if _bound(candidate) > cutoff:
        return None
    best: Choice | None = None
    for variant, columns in _variants(candidate):
        lowest = _least_bottleneck(variant)
        if lowest is not None and _bound(variant, lowest) <= cutoff:
            found = _Scan(variant, lowest, cutoff).run()
            found = found and replace(found, columns=tuple(columns[list(found.columns)].tolist()))
            best = _first(candidate, best, found)
            cutoff = cutoff if best is None else min(cutoff, best.objective_seconds * (1 + TIE))
    return best


def _variants(candidate: Candidate) -> Iterator[tuple[Candidate, IntArray]]:
    """The candidate with each possible time of the last chunk, and the numbers of the columns in the whole candidate.

    Its seconds include each stage's wait for this chunk. If no stage waits, only the unchanged candidate is returned.
    """
    last = candidate.stage == candidate.num_stages - 1
    times = np.unique(candidate.slack_seconds[last])
    if not len(times) or times[-1] <= candidate.slack_seconds.min():
        yield candidate, np.arange(candidate.num_columns)
        return
    for time in times.tolist():
        kept = ~last | (candidate.slack_seconds == time)
        own = candidate.keep(kept)
        seconds = own.seconds + np.maximum(0.0, time - own.slack_seconds)
        own = replace(own, seconds=seconds, slack_seconds=np.zeros_like(seconds))
        yield own, np.flatnonzero(kept)


def _first(candidate: Candidate, one: Choice | None, other: Choice | None) -> Choice | None:
    """The faster of two choices of one candidate; if they tie, the one with lexicographically smaller layers."""
    if one is None or other is None:
        return one or other
    fast, slow = sorted((one, other), key=lambda choice: choice.objective_seconds)
    if slow.objective_seconds > fast.objective_seconds * (1 + TIE):
        return fast
    return min(fast, slow, key=lambda choice: tuple(candidate.layers[list(choice.columns)].tolist()))


def _fastest(candidate: Candidate, values: FloatArray) -> FloatArray:
    """Least value on each stage, [num_stages]; infinite if a stage has no column."""
    least = np.full(candidate.num_stages, np.inf)
    np.minimum.at(least, candidate.stage, values)
    return least


def _bound(candidate: Candidate, bottleneck: float = 0.0) -> float:
    """A lower bound in O(columns): every stage takes its least time, and every layer the least price per load.

    With p the least seconds / load of any column, each stage takes at least p times its load. All stages together take
    at least p times the total load, and the slowest stage takes at least an even share of this time.
    bottleneck: the least time of the slowest stage of any choice, where it is known.
    """
    fastest = float(_fastest(candidate, candidate.seconds).max())
    if fastest == np.inf:  # a stage has no column; with one microbatch the sum below would be no number
        return np.inf
    bottleneck = max(bottleneck, fastest, _least_total(candidate, candidate.seconds) / candidate.num_stages)
    tail = float(_fastest(candidate, candidate.tail_seconds).max())
    passes = _least_total(candidate, candidate.pass_seconds)
    return candidate.constant_seconds + candidate.steady_count * bottleneck + passes + tail


def _least_total(candidate: Candidate, values: FloatArray) -> float:
    """Least sum of `values` over the stages: from the least value of each stage, and from the least value per load."""
    per_load = float((values / np.maximum(candidate.load, 1)).min())
    return max(float(_fastest(candidate, values).sum()), per_load * candidate.total_load)


def _least_bottleneck(candidate: Candidate) -> float | None:
    """The least possible time of the slowest stage, by bisection over the distinct stage times.

    None if no choice exists.
    """
    if candidate.num_columns == 0 or not _can_hold_all(candidate, np.inf):
        return None
    thresholds = np.unique(candidate.seconds)
    low = int(np.searchsorted(thresholds, _fastest(candidate, candidate.seconds).max()))
    high = len(thresholds) - 1
    while low < high:
        middle = (low + high) // 2
        if _can_hold_all(candidate, float(thresholds[middle])):
            high = middle
        else:
            low = middle + 1
    return float(thresholds[low])


def _can_hold_all(candidate: Candidate, threshold: float) -> bool:
    """Whether stages of at most `threshold` seconds can hold all layers.

    Bit l of `sums` is set where the stages so far can hold exactly l layers.
    """
    allowed, num_states = candidate.seconds <= threshold, candidate.pattern.num_states
    key = (candidate.stage * num_states + candidate.start) * (candidate.num_layers + 1) + candidate.layers
    ways, layers = np.divmod(np.unique(key[allowed]), candidate.num_layers + 1)
    stage, start = np.divmod(ways, num_states)
    all_layers = (1 << (candidate.num_layers + 1)) - 1
    of_state = [_bits(candidate.num_layers, candidate.pattern, state) for state in range(num_states)]
    ends, sums = np.searchsorted(stage, np.arange(1, candidate.num_stages)), 1
    for states, counts in zip(np.split(start, ends), np.split(layers, ends), strict=True):
        grown = 0
        for state, count in zip(states.tolist(), counts.tolist(), strict=True):
            grown |= (sums & of_state[state]) << count
        sums = grown & all_layers
    return bool(sums >> candidate.num_layers & 1)


@cache
def _bits(num_layers: int, pattern: Pattern, state: int) -> int:
    """The positions that have a state, as an integer: bit l is set if the position after l layers has the state."""
    return sum(1 << position for position in range(state, num_layers + 1, int(pattern.stride(state))))


@dataclass(frozen=True, slots=True)
class _Box:
    """A range of both thresholds, [low_a, high_a] x [low_b, high_b], as positions in the lists of distinct times."""

    low_a: int
    high_a: int
    low_b: int
    high_b: int


class _Scan:
    """Branch and bound over the two thresholds of one candidate."""

    def __init__(self, candidate: Candidate, least_bottleneck: float, cutoff: float) -> None:
        self.candidate, self.cutoff = candidate, cutoff
        self.found: Choice | None = None
        least_tail = float(_fastest(candidate, candidate.tail_seconds).max())
        times, tails = np.unique(candidate.seconds), np.unique(candidate.tail_seconds)
        self.bottlenecks = times[times >= least_bottleneck]
        self.tails = tails[tails >= least_tail]

    def run(self) -> Choice | None:
        """The optimum, or None if no choice is as good as the cutoff."""
        last_a, last_b = len(self.bottlenecks) - 1, len(self.tails) - 1
        self._visit(_Box(0, 0, 0, last_b))  # a good first choice shortens the list of bottlenecks
        last_a = min(last_a, self._last_useful_bottleneck())
        waiting = [(0.0, 0, _Box(0, last_a, 0, last_b))]
        count = 1  # breaks ties in the heap by age
        while waiting:
            bound, _, box = heapq.heappop(waiting)
            if bound > self.cutoff:
                break
            bound = self._visit(box)
            if bound > self.cutoff or self._is_point(box):
                continue
            for half in self._halves(box):
                heapq.heappush(waiting, (bound, count, half))
                count += 1
        return self.found

    def _last_useful_bottleneck(self) -> int:
        """Position of the longest bottleneck at which a choice may still meet the cutoff."""
        candidate = self.candidate
        passes = _least_total(candidate, candidate.pass_seconds)
        least = candidate.constant_seconds + candidate.steady_count * self.bottlenecks + passes + self.tails[0]
        return max(int(np.searchsorted(least, self.cutoff, side="right")) - 1, 0)

    def _cost(self, a: int, b: int) -> float:
        """Step seconds of the thresholds at these positions, without the sum of pass seconds."""
        steady = self.candidate.steady_count * float(self.bottlenecks[a])
        return self.candidate.constant_seconds + steady + float(self.tails[b])

    def _is_point(self, box: _Box) -> bool:
        """Whether the box cannot be divided: it holds one pair of thresholds, or only pairs of equal cost."""
        highest = self._cost(box.high_a, box.high_b)
        return highest - self._cost(box.low_a, box.low_b) <= TIE * highest

    def _halves(self, box: _Box) -> Iterator[_Box]:
        """The two halves of the box, cut across the side along which the cost differs more."""
        candidate = self.candidate
        wide = candidate.steady_count * (self.bottlenecks[box.high_a] - self.bottlenecks[box.low_a])
        tall = self.tails[box.high_b] - self.tails[box.low_b]
        if wide >= tall:
            middle = (box.low_a + box.high_a) // 2
            yield _Box(box.low_a, middle, box.low_b, box.high_b)
            yield _Box(middle + 1, box.high_a, box.low_b, box.high_b)
        else:
            middle = (box.low_b + box.high_b) // 2
            yield _Box(box.low_a, box.high_a, box.low_b, middle)
            yield _Box(box.low_a, box.high_a, middle + 1, box.high_b)

    def _visit(self, box: _Box) -> float:
        """Lower bound of the box; the best choice of the box is kept if it improves on all earlier choices."""
        candidate = self.candidate
        allowed = candidate.seconds <= self.bottlenecks[box.high_a]
        allowed &= candidate.tail_seconds <= self.tails[box.high_b]
        least = _least_sums(candidate, allowed)
        total = float(least[0, candidate.num_layers])
        bound = self._cost(box.low_a, box.low_b) + total
        if not bound <= self.cutoff:  # infinite where the thresholds leave no choice
            return bound
        self._keep(_walk(candidate, allowed, least, total))
        if self._is_point(box):
            # Whatever the cutoff leaves for the sum may be spent on lexicographically smaller layers.
            seconds = self.cutoff - self._cost(box.high_a, box.high_b)
            self._keep(_walk(candidate, allowed, least, seconds))
        return bound

    def _keep(self, columns: IntArray) -> None:
        seconds = self.candidate.step_seconds(columns)
        choice = Choice(candidate=0, columns=tuple(columns.tolist()), objective_seconds=seconds)
        self.cutoff = min(self.cutoff, seconds * (1 + TIE))
        best = self.found
        if best is None or best.objective_seconds > self.cutoff:
            self.found = choice if seconds <= self.cutoff else best
        elif seconds <= self.cutoff and self._layers(choice) < self._layers(best):
            self.found = choice

    def _layers(self, choice: Choice) -> tuple[int, ...]:
        return tuple(self.candidate.layers[list(choice.columns)].tolist())


def _least_sums(candidate: Candidate, allowed: Mask) -> FloatArray:
    """Least sum of pass seconds from each stage to the last, [num_stages + 1, num_layers + 1]: by remaining layers."""
    num_layers, num_stages = candidate.num_layers, candidate.num_stages
    stage, layers, seconds = candidate.stage[allowed], candidate.layers[allowed], candidate.pass_seconds[allowed]
    start = candidate.start[allowed]
    most_left, stride = (num_layers - start).tolist(), candidate.pattern.stride(start).tolist()
    least = np.full((num_stages + 1, num_layers + 1), np.inf)
    least[num_stages, 0] = 0.0
    first = np.searchsorted(stage, np.arange(num_stages + 1))
    for here in reversed(range(num_stages)):
        row, rest = least[here], least[here + 1]
        for column in range(first[here], first[here + 1]):
            count, most, step = int(layers[column]), most_left[column], stride[column]
            if count > most:
                continue
            fewest = count + (most - count) % step  # layers left at the last position with enough of them
            here_with = row[fewest : most + 1 : step]
            after = rest[fewest - count : most + 1 - count : step]
            np.minimum(here_with, after + seconds[column], out=here_with)
    return least


def _walk(candidate: Candidate, allowed: Mask, least: FloatArray, budget: float) -> IntArray:
    """The choice with the lexicographically smallest layers whose sum of pass seconds is within the (finite) budget.

    If the budget is below the least sum because of rounding, the least sum replaces it.
    """
    columns = np.flatnonzero(allowed)
    first = np.searchsorted(candidate.stage[columns], np.arange(candidate.num_stages + 1))
    left, chosen = candidate.num_layers, []
    for stage in range(candidate.num_stages):
        here = columns[first[stage] : first[stage + 1]]
        start = int(candidate.pattern.state(candidate.num_layers - left))
        here = here[(candidate.layers[here] <= left) & (candidate.start[here] == start)]
        after = least[stage + 1, left - candidate.layers[here]]
        sums = candidate.pass_seconds[here] + after
        affordable = np.flatnonzero(sums <= max(budget, float(sums.min())))
        same_layers = affordable[candidate.layers[here[affordable]] == candidate.layers[here[affordable[0]]]]
        column = here[same_layers[np.argmin(sums[same_layers])]]
        chosen.append(column)
        left -= int(candidate.layers[column])
        budget -= float(candidate.pass_seconds[column])
    return np.array(chosen, dtype=np.int64)
