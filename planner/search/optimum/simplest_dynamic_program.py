"""The simplest choice of one candidate without an integer program: the second method of the search for simplicity.

The method begins with the fastest choice of the candidate. Then it fixes the keys in the order of `Simplicity`, each at
the least value for which a choice within the cutoff exists. To find this value it tries all values in ascending order,
with the dynamic program of the first solve (`best_choice`) on fewer columns:

    recomputed   the tenths of recomputed layers are the budget of a choice
    uneven       0: the same number of layers on all inner stages; every number is tried
    risk         no column is of a higher class

The other keys belong to the configuration. No choice of the candidate is simpler than the result, because each key has
the least value that the earlier keys permit. The result is the fastest choice with these keys.
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
    from collections.abc import Iterator, Mapping

    from planner.numbers import Mask
    from planner.search.optimum.candidate import Choice
    from planner.search.optimum.simplicity import Rated


class Standing(NamedTuple):
    """The rank of a choice among those within the window: its keys, then its step time; less is better."""

    simplicity: Simplicity
    seconds: float


def simplest_choice(rated: Rated, cutoff: float, *, before: Standing | None = None) -> tuple[Standing, Choice] | None:
    """The simplest of a candidate's choices of at most `cutoff` seconds; of equally simple choices the fastest.

    The result is None if no choice is within the cutoff, or if no such choice has a better rank than `before`.
    """
    choice = _fastest(rated, {}, cutoff)
    if choice is None:
        return None
    limits: dict[str, int] = {}
    for key, least in least_of(rated)._asdict().items():
        value = getattr(rated.simplicity(choice.columns), key)
        for smaller in range(least, value):
            if before is not None and (*limits.values(), smaller) > before.simplicity:
                return None
            simpler = _fastest(rated, limits | {key: smaller}, cutoff)
            if simpler is not None:
                choice, value = simpler, smaller
                break
        limits[key] = value
    standing = Standing(Simplicity(**limits), choice.objective_seconds)
    return (standing, choice) if before is None or standing < before else None


def _fastest(rated: Rated, limits: Mapping[str, int], cutoff: float) -> Choice | None:
    """The fastest choice within the cutoff whose keys do not exceed `limits`, for the keys that columns decide."""
    columns = np.flatnonzero(rated.risk <= limits["risk"]) if "risk" in limits else np.arange(len(rated.risk))
    kept, best = rated.keep(columns), None
    for way in _even_ways(kept) if limits.get("uneven") == 0 else [np.ones(len(columns), dtype=np.bool_)]:
        some = np.flatnonzero(way)
        choice = _within_budget(kept.keep(some), limits.get("recomputed"), cutoff)
        if choice is not None:
            best = replace(choice, columns=tuple(columns[some[list(choice.columns)]].tolist()))
            cutoff = choice.objective_seconds * (1 - TIE)
    return best


def most_even(rated: Rated, standing: Standing, choice: Choice) -> Choice:
    """A choice of the same rank whose smallest stage, or else smallest inner stage, holds the most layers possible.

    Many splits often take equally long, because only the slowest stage and the sum over the stages set the step time.
    Of these splits, `choice` has the lexicographically smallest layers, so some of its stages may hold fewer layers
    than necessary.
    """
    if not standing.simplicity.uneven:
        return choice
    candidate, limits = rated.candidate, standing.simplicity._asdict()
    fewest_now = int(candidate.layers[list(choice.columns)].min())
    for fewest in range(candidate.num_layers // candidate.num_stages, fewest_now, -1):
        for may_hold_less in (np.zeros(candidate.num_columns, dtype=np.bool_), ~rated.inner):
            some = np.flatnonzero(may_hold_less | (candidate.layers >= fewest))
            if len(np.unique(candidate.stage[some])) < candidate.num_stages:
                continue
            found = _fastest(rated.keep(some), limits, standing.seconds * (1 + TIE))
            if found is not None:
                return replace(found, columns=tuple(some[list(found.columns)].tolist()))
    return choice


def _even_ways(kept: Rated) -> Iterator[Mask]:
    """Sets of columns, one set for each number of layers that all inner stages can hold."""
    inner = kept.inner
    if kept.candidate.num_stages < 3:
        yield ~inner
        return
    for count in np.unique(kept.candidate.layers[inner & kept.alike]).tolist():
        way = ~inner | (kept.alike & (kept.candidate.layers == count))
        if len(np.unique(kept.candidate.stage[way])) == kept.candidate.num_stages:
            yield way


def _within_budget(kept: Rated, tenths: int | None, cutoff: float) -> Choice | None:
    """The fastest choice within the cutoff that recomputes at most `tenths` tenths of the model."""
    if tenths is None:
        return best_choice(kept.candidate, cutoff=cutoff)
    candidate, budget = kept.candidate, tenths * kept.candidate.num_layers
    columns = np.flatnonzero(kept.repeated <= budget)
    if not len(columns):
        return None
    units, some = kept.repeated[columns], candidate.keep(columns)
    step = math.gcd(*units.tolist())
    if step == 0 or (units <= tenths * some.layers).all():  # no choice exceeds the budget
        choice = best_choice(some, cutoff=cutoff)
    else:
        choice = best_choice(some, cutoff=cutoff, units=units // step, budget=budget // step)
    return choice and replace(choice, columns=tuple(columns[list(choice.columns)].tolist()))


def least_of(rated: Rated) -> Simplicity:
    """A lower bound of the keys of a candidate's choices: the least value of each key on its own."""
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
