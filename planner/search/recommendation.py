"""The recommendation: the first, by a practitioner's ranking, of a closed list of layouts near the proven minimum.

The list depends on the job and on the window (`--within`) alone. For each kind of layout (tp, cp, ep, pp) whose own
minimum is in the window it has

    the fastest layout of the kind, and its variants: every combination of
    recompute    as the fastest, or one policy on all stages
    layers       as the fastest, or even; or even but for the first and the last stage, which share what is left
    interleave   as the fastest, 1, 2, 4 or 8, or any number that divides the layers into equal chunks
    ZeRO stage   as the fastest, or any other

Each variant has the price that the two methods saw. A variant that no rule allows, that does not fit, or that is
outside the window is left out. `ranking.keys_of` ranks the list; the step time decides between equal keys. Time is the
last key, so a layout that is slower than another and better in no key never comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.schedule import EXECUTED
from planner.layout import divisors, even_stages
from planner.plan_parts import Recommendation
from planner.search.decision import best_layout, fastest_of
from planner.search.found import Assigned
from planner.search.near import Bounded, Near
from planner.search.objectives import kind_of
from planner.search.ranking import keys_of
from planner.search.space.arrays import AGREEMENT, TIE
from planner.search.space.configurations import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.numbers import FloatArray, IntArray
    from planner.search.found import Found
    from planner.search.objectives import Objective, Rank
    from planner.search.optimum.candidate import Candidate
    from planner.search.space.configurations import DegreeArrays
    from planner.search.space.space import Space

CHUNKS: Final = (1, 2, 4, 8)
"""Chunks of a stage that variants have, beside those of the fastest layout of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Layouts that are worse than the minimum by at most a share of the objective."""

    objective: Objective
    minimum: Rank
    within: float

    def longest_seconds(self, devices: FloatArray) -> FloatArray:
        """The longest step of a layout in the window, for each number of devices as the objective counts them, [n]."""
        longest = self.objective.seconds_up_to(self.minimum, devices, 1 + self.within)
        return np.asarray(longest, dtype=np.float64)


def recommended(found: Found, window: Window) -> tuple[Assigned, Recommendation]:
    """The first layout of the closed list by the ranking; of equal keys and step times the first by `fastest_of`."""
    listed = shortlist(found, window)
    keys = [keys_of(found.space.job, found.layout_of(each)) for each in listed]
    tied = [each for each, own in zip(listed, keys, strict=True) if own == min(keys)]
    chosen = fastest_of(tied, [(each.seconds, each.seconds) for each in tied])
    return chosen, Recommendation(within=float(window.within), num_listed=len(listed), keys=min(keys))


def shortlist(found: Found, window: Window) -> list[Assigned]:
    """The closed list of the module's docstring."""
    space, listed = found.space, dict.fromkeys(fastest_of_kinds(found, window))
    variants = [(fastest, some) for fastest in listed for some in _configurations(space, fastest.degrees)]
    near = Near(space, [Bounded(degrees=some, seconds=np.zeros(len(some))) for _, some in variants])
    if not len(near):
        return list(listed)
    devices = window.objective.devices(space.job, near.degrees(slice(None)))
    longest = window.longest_seconds(np.broadcast_to(devices, len(near)).astype(np.float64))
    fastest_of_row = [fastest for fastest, some in variants for _ in range(len(some))]
    candidates = near.candidates(np.arange(len(near)), longest)
    for row, (fastest, candidate) in enumerate(zip(fastest_of_row, candidates, strict=True)):
        for each in _assignments(candidate, fastest, near.one(row)):
            if each.seconds <= longest[row] * (1 + TIE):
                listed.setdefault(each)
    return list(listed)


def fastest_of_kinds(found: Found, window: Window) -> list[Assigned]:
    """The best layout of each kind whose best layout is in the window."""
    kinds: dict[tuple[int, ...], list[Assigned]] = {}
    for each in found.layouts:
        kinds.setdefault(kind_of(each.degrees), []).append(each)
    best = [best_layout(found, window.objective, layouts) for layouts in kinds.values()]
    devices = [window.objective.devices(found.space.job, each.degrees) for each in best]
    longest = window.longest_seconds(np.array(devices, dtype=np.float64)) * (1 + AGREEMENT)
    return [each for each, seconds in zip(best, longest.tolist(), strict=True) if each.seconds <= seconds]


def _configurations(space: Space, one: DegreeArrays) -> Iterator[DegreeArrays]:
    """A configuration with every ZeRO stage and number of chunks of its variants, in blocks of one schedule."""
    chunks = {one.schedule: {one.interleave}}
    if one.pp > 1 and one.schedule in ("1f1b", "interleaved"):
        per_stage, rest = divmod(space.job.model.num_layers, int(one.pp))
        every = {*CHUNKS, one.interleave, *divisors(1 if rest else per_stage)}
        chunks = {"1f1b": every & {1}, "interleaved": every - {1}}
    engine = space.job.engine
    zero = sorted({*engine.can.zero_stages, *engine.pipeline.zero_stages, one.zero})
    for schedule in space.schedules:
        pairs = np.array(list(product(zero, sorted(chunks.get(schedule, ())))), dtype=np.int64).reshape(-1, 2)
        block = one.at_once().take(np.zeros(len(pairs), dtype=np.int64))
        block = replace(block, schedule=schedule, zero=pairs[:, 0], interleave=pairs[:, 1])
        block = block.having("recompute", np.full(len(pairs), OWN))
        legal = space.legal(block)
        if legal.any():
            yield space.with_policies(block.take(legal))


def _assignments(candidate: Candidate, fastest: Assigned, one: DegreeArrays) -> Iterator[Assigned]:
    """The variants that are choices of a candidate, with their step seconds."""
    splits: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    if one.schedule in EXECUTED:  # the price has one assignment
        splits[tuple(candidate.layers.tolist()), tuple(candidate.last.tolist())] = None
        policies: list[tuple[int, ...]] = [tuple(candidate.policy.tolist())]
    else:
        splits[fastest.layers, fastest.last] = None
        for layers in (fastest.layers, *_splits(candidate.num_layers, one.pp, one.interleave)):
            splits[layers, tuple(number // one.interleave for number in layers)] = None  # chunks that are even
        alike = ((code,) * candidate.num_stages for code in np.unique(candidate.policy).tolist())
        policies = list(dict.fromkeys((fastest.policies, *alike)))
    for (layers, last), codes in product(splits, policies):
        columns = _columns_of(candidate, layers, last, codes)
        if len(columns) == candidate.num_stages:
            seconds = candidate.step_seconds(columns)
            yield Assigned(degrees=one, layers=layers, last=last, policies=codes, seconds=seconds)


def _columns_of(candidate: Candidate, layers: Sequence[int], last: Sequence[int], policies: Sequence[int]) -> IntArray:
    """The columns of stages with these layers and policies; fewer than there are stages if the candidate lacks one.

    last: layers of each stage's last chunk.
    """
    if len(layers) < candidate.num_stages:
        return np.zeros(0, dtype=np.int64)
    own, stage = np.array(layers, dtype=np.int64), candidate.stage
    begins = candidate.pattern.state(np.cumsum(own) - own)
    here = (candidate.layers == own[stage]) & (candidate.last == np.array(last)[stage])
    here &= candidate.policy == np.array(policies)[stage]
    return np.flatnonzero(here & (candidate.start == np.broadcast_to(begins, own.shape)[stage]))


def _splits(num_layers: int, pp: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage: as even as possible; and even but for the ends, which share what equal stages leave."""
    yield even_stages(num_layers, pp)
    inner = chunks * -(-num_layers // (pp * chunks))
    left = num_layers - inner * (pp - 2)
    if pp > 2 and left >= 0:
        for first in {left // 2, left - left // 2}:
            yield (first, *(inner,) * (pp - 2), left - first)
