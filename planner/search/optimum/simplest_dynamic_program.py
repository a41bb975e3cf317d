"""The simplest choice of one candidate without an integer program: the second method of the second solve.

The keys of a choice that its configuration does not settle are found one after the other, each at its least under those
before it, by the dynamic program of the first solve (`best_choice`) on fewer columns:

    risk         the least class whose columns alone leave a choice within the cutoff
    recomputed   the least number of tenths that such a choice takes as its budget
    uneven       0 where such a choice exists with equally many layers on all inner stages, for some number of them
    seconds      the least of those that are left

No other choice of the candidate comes before it, because each step takes the least value that any choice has among
those that are the least in the steps before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.search.optimum.dynamic_program import best_choice
from planner.search.optimum.simplicity import Simplicity, tenths_of
from planner.search.space.arrays import TIE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.numbers import IntArray, Mask
    from planner.search.optimum.candidate import Choice
    from planner.search.optimum.simplicity import Rated


class Standing(NamedTuple):
    """Where a choice stands among those within the window: by its keys, then by its step time; less is better."""

    simplicity: Simplicity
    seconds: float


def simplest_choice(rated: Rated, cutoff: float, *, before: Standing | None = None) -> tuple[Standing, Choice] | None:
    """The simplest choice of a candidate within `cutoff` seconds; the fastest of equally simple ones.

    None where there is none, or none that comes before `before`.
    """
    for risk in sorted(set(rated.risk.tolist())):
        if _is_behind(before, risk, rated.idle):
            return None
        columns = np.flatnonzero(rated.risk <= risk)
        if best_choice(rated.candidate.keep(columns), cutoff=cutoff) is not None:
            found = _least_repeated(rated.keep(columns), risk, cutoff, before)
            return found and (found[0], _of_all(found[1], columns))
    return None


def _is_behind(before: Standing | None, *keys: int) -> bool:
    """Whether what begins with these keys comes behind."""
    return before is not None and keys > before.simplicity[: len(keys)]


def _of_all(choice: Choice, columns: IntArray) -> Choice:
    """A choice among some columns, by the positions that these have among all."""
    return replace(choice, columns=tuple(columns[list(choice.columns)].tolist()))


def _least_repeated(kept: Rated, risk: int, cutoff: float, before: Standing | None) -> tuple[Standing, Choice] | None:
    """With as little computed again as any choice within the cutoff has."""
    layers = np.maximum(kept.candidate.layers, 1)
    least, most = (math.ceil(each) for each in ((kept.repeated / layers).min(), (kept.repeated / layers).max()))
    for tenths in range(least, most + 1):
        if _is_behind(before, risk, kept.idle, tenths):
            return None
        if _within_budget(kept, tenths, cutoff) is not None:
            return _most_even(kept, (risk, tenths), cutoff, before)
    raise AssertionError(f"{kept.candidate.name}: no choice takes {most} tenths, the most that any column takes")


def _most_even(
    kept: Rated, keys: tuple[int, int], cutoff: float, before: Standing | None
) -> tuple[Standing, Choice] | None:
    """With even stages where a choice within the cutoff and the budget has them; then the fastest."""
    risk, tenths = keys
    for uneven, ways in ((0, _even_ways(kept)), (1, iter([np.ones(kept.candidate.num_columns, dtype=np.bool_)]))):
        simplicity = Simplicity(risk, kept.idle, tenths, kept.interleave, uneven, kept.axes)
        if before is not None and simplicity > before.simplicity:
            return None
        limit, best = cutoff, None
        if before is not None and simplicity == before.simplicity:
            limit = min(cutoff, before.seconds * (1 - TIE))
        exists = False
        for way in ways:
            columns = np.flatnonzero(way)
            choice = _within_budget(kept.keep(columns), tenths, cutoff)
            exists = exists or choice is not None
            if choice is not None and choice.objective_seconds <= limit:
                limit, best = choice.objective_seconds * (1 - TIE), _of_all(choice, columns)
        if exists:
            return None if best is None else (Standing(simplicity, best.objective_seconds), best)
    raise AssertionError(f"{kept.candidate.name}: a choice was found and is gone")


def _even_ways(kept: Rated) -> Iterator[Mask]:
    """Columns of choices with equally many layers on all inner stages, once for each such number."""
    inner = kept.inner
    if kept.candidate.num_stages < 3:
        yield ~inner
        return
    for count in np.unique(kept.candidate.layers[inner & kept.alike]).tolist():
        way = ~inner | (kept.alike & (kept.candidate.layers == count))
        if len(np.unique(kept.candidate.stage[way])) == kept.candidate.num_stages:
            yield way


def _within_budget(kept: Rated, tenths: int, cutoff: float) -> Choice | None:
    """The fastest choice within the cutoff that computes again at most so many tenths of the model."""
    candidate, budget = kept.candidate, tenths * kept.candidate.num_layers
    columns = np.flatnonzero(kept.repeated <= budget)
    if not len(columns):
        return None
    units, some = kept.repeated[columns], candidate.keep(columns)
    step = math.gcd(*units.tolist())
    if step == 0 or (units <= tenths * some.layers).all():  # no choice takes more
        choice = best_choice(some, cutoff=cutoff)
    else:
        choice = best_choice(some, cutoff=cutoff, units=units // step, budget=budget // step)
    return choice and _of_all(choice, columns)


def least_of(rated: Rated) -> Simplicity:
    """Keys that no choice of a candidate comes before: each column's at its least on its own."""
    candidate = rated.candidate
    first = np.searchsorted(candidate.stage, np.arange(candidate.num_stages))
    of_stages = tenths_of(int(np.minimum.reduceat(rated.repeated, first).sum()), candidate.num_layers)
    of_layers = math.ceil((rated.repeated / np.maximum(candidate.layers, 1)).min())
    return Simplicity(
        risk=int(np.minimum.reduceat(rated.risk, first).max()),
        idle=rated.idle,
        recomputed=max(of_stages, of_layers),
        interleave=rated.interleave,
        uneven=0,
        axes=rated.axes,
    )
