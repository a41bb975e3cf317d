"""The second solve: the simplest of the layouts that are nearly as good as the proven minimum.

Layouts within a share of the minimum (the window) are compared by their keys (`optimum.simplicity`) in order, then by
step time. Every configuration whose lower bound is within the window is included, even if the first solve ruled it out.

Two methods solve this. The dynamic program reads configurations in the order of the configurations' own keys. The
search stops when these keys are worse than the keys of the simplest layout so far (`optimum.simplest_dynamic_program`).
The integer program decides among all configurations that keys and its own lower bounds do not rule out
(`optimum.simplest_program`). Both methods share legal configurations, prices, the keys of columns and lower bounds of
step times, but no cutoff. The two methods must agree. The answer's keys and step time must equal the keys and step time
of its layout. No layout of the first solve may be simpler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.estimate import estimate
from planner.errors import SolverTrouble
from planner.search.best_first import assigned_by
from planner.search.optimum.candidate import Disagreement
from planner.search.optimum.integer_program import columns_within
from planner.search.optimum.pruning import prune
from planner.search.optimum.rating import configuration_keys, rated, simplicity_of
from planner.search.optimum.simplest_dynamic_program import Standing, least_of, most_even, simplest_choice
from planner.search.optimum.simplest_program import Contenders, SimplestAnswer, solve_simplest
from planner.search.optimum.simplicity import Simplicity
from planner.search.space.arrays import AGREEMENT, TIE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.numbers import FloatArray, IntArray
    from planner.search.best_first import Assigned, Found
    from planner.search.objectives import Objective, Rank
    from planner.search.optimum.candidate import Candidate, Choice
    from planner.search.optimum.integer_program import SolverName
    from planner.search.optimum.simplicity import Rated
    from planner.search.space.configurations import DegreeArrays

WITHIN: Final = 0.02
"""Default of the share of the objective by which a simpler layout may be worse (`--within`)."""

_FIRST: Final = 16  # configurations priced at first; each further round prices twice as many
_MOST: Final = 256
_MOST_TRIED: Final = 16  # layouts of the first solve that are compared with the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Layouts that are worse than the minimum by at most a share of the objective."""

    objective: Objective
    minimum: Rank
    within: float

    def longest_seconds(self, devices: FloatArray) -> FloatArray:
        """The longest step of a layout in the window, for each number of devices as the objective counts them, [n]."""
        first, seconds = (value * (1 + self.within) for value in self.minimum)
        if self.objective.name == "cost":
            longest = first / devices
        elif self.objective.name == "gpus":
            longest = np.where(devices <= self.minimum[0], seconds, 0.0)
        else:
            longest = np.full(np.shape(devices), first)
        return np.asarray(np.minimum(longest, self.objective.longest_seconds(devices)), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The simplest layout within the window, its keys, and the integer program's answer that proves it."""

    assigned: Assigned
    simplicity: Simplicity
    answer: SimplestAnswer
    warnings: tuple[str, ...] = ()


def simplest_within(
    found: Found,
    window: Window,
    solver: SolverName = "cbc",
    time_limit: float | None = None,
) -> Recommendation:
    """The simplest layout within a window of the proven minimum.

    Raises:
        Disagreement: the two methods differ, or the answer's keys or step time differ from its layout's; a bug.
    """
    inside, longest = _inside(found, window)
    standing, assigned = _by_dynamic_program(found, inside, longest)
    warnings: tuple[str, ...] = ()
    try:
        answer = _by_program(found, inside, longest, solver, time_limit)
    except SolverTrouble as trouble:
        answer = SimplestAnswer(status="optimal", solver="dynamic program")
        warnings = (f"{solver} failed, so the dynamic program alone chose the simplest layout: {trouble}",)
    else:
        _check_agreement(answer, standing)
    _check_layout(found, window, standing, assigned)
    return Recommendation(assigned=assigned, simplicity=standing.simplicity, answer=answer, warnings=warnings)


def _inside(found: Found, window: Window) -> tuple[IntArray, FloatArray]:
    """Positions of configurations whose lower bounds are within the window, and the longest step of each, both [n]."""
    near = found.near
    devices = np.broadcast_to(window.objective.devices(found.job, near.degrees(slice(None))), near.seconds.shape)
    longest = window.longest_seconds(devices)
    inside = np.flatnonzero(near.seconds <= longest * (1 + TIE))
    return inside, longest[inside]


def _in_parts(order: IntArray) -> Iterator[IntArray]:
    """Consecutive parts of `order`, each larger than the part before."""
    first, size = 0, _FIRST
    while first < len(order):
        yield order[first : first + size]
        first, size = first + size, min(2 * size, _MOST)


def _alone(keys: IntArray) -> Simplicity:
    """The keys of a configuration, with the best value for each key that its columns decide."""
    idle, interleave, axes = keys.tolist()
    return Simplicity(idle=idle, recomputed=0, interleave=interleave, uneven=0, axes=axes, risk=0)


def _by_dynamic_program(found: Found, inside: IntArray, longest: FloatArray) -> tuple[Standing, Assigned]:
    """The simplest layout of all configurations, which are solved in the order of their own keys."""
    job, near = found.job, found.near
    keys = configuration_keys(job, near.degrees(inside))
    order = np.lexsort((near.seconds[inside], *keys.T[::-1]))
    best: tuple[Standing, tuple[int, Rated, Choice]] | None = None
    for part in _in_parts(order):
        wanted = [
            row
            for row in part.tolist()
            if best is None or Standing(_alone(keys[row]), near.seconds[inside[row]]) <= best[0]
        ]
        kept = _of_dynamic_program(found, inside[wanted], longest[wanted])
        least = {row: least_of(each) for row, each in zip(wanted, kept, strict=True) if each is not None}
        for row, each in zip(wanted, kept, strict=True):
            if each is None or (best and least[row] > best[0].simplicity):
                continue
            simplest = simplest_choice(each, float(longest[row]) * (1 + TIE), before=best and best[0])
            if simplest is not None:
                standing, choice = simplest
                best = standing, (int(inside[row]), each, choice)
    if best is None:
        raise Disagreement("the second solve finds no layout within the window of the first solve's minimum")
    standing, (position, own, choice) = best
    return standing, assigned_by(near.one(position), own.candidate, most_even(own, standing, choice))


def _of_dynamic_program(found: Found, positions: IntArray, longest: FloatArray) -> list[Rated | None]:
    """The configurations with keys, and with the columns that a choice within the window may use.

    An entry is None if a choice of this configuration cannot be in the window.
    """
    kept: dict[int, Rated] = {}
    for here, degrees, priced in _in_window(found, positions, longest):
        masks = prune(priced, np.array([each.longest_seconds for each in priced]), fastest_only=False)
        rows = [row for row, mask in enumerate(masks) if mask.any()]
        some = [priced[row].keep(masks[row]) for row in rows]
        with_keys = rated(found.job, degrees.take(np.array(rows, dtype=np.int64)), some)
        kept |= zip(here[rows].tolist(), with_keys, strict=True)
    return [kept.get(position) for position in positions.tolist()]


def _in_window(
    found: Found, positions: IntArray, longest: FloatArray
) -> Iterator[tuple[IntArray, DegreeArrays, list[Candidate]]]:
    """The configurations of each schedule, their degrees, and their candidates with the window as deadline."""
    limit_of = dict(zip(positions.tolist(), longest.tolist(), strict=True))
    for here, degrees, priced in found.near.candidates(positions, longest):
        limits = [limit_of[position] for position in here.tolist()]
        yield here, degrees, [replace(each, longest_seconds=limit) for each, limit in zip(priced, limits, strict=True)]


def _by_program(
    found: Found,
    inside: IntArray,
    longest: FloatArray,
    solver: SolverName,
    time_limit: float | None,
) -> SimplestAnswer:
    """The best answer of the integer programs, over all configurations that may hold a layout as simple and as fast."""
    idle, interleave, axes = configuration_keys(found.job, found.near.degrees(inside)).T
    bounds, contenders = found.near.seconds[inside], Contenders()
    for part in _in_parts(np.lexsort((bounds, axes, interleave, idle))):
        wanted = np.array(
            [
                row
                for row in part.tolist()
                if contenders.may_have(Simplicity(idle[row], 0, interleave[row], 0, axes[row], 0), bounds[row])
            ],
            dtype=np.int64,
        )
        for _, degrees, priced in _in_window(found, inside[wanted], longest[wanted]):
            columns = columns_within(priced, np.inf)
            some = [priced[row].keep(own) for row, own in columns.items()]
            contenders.add(rated(found.job, degrees.take(np.array(list(columns), dtype=np.int64)), some))
    return solve_simplest(contenders.left(), solver=solver, time_limit=time_limit)


def _check_agreement(answer: SimplestAnswer, standing: Standing) -> None:
    """Check that the two methods agree on the keys and the step time of the simplest layout.

    Raises:
        Disagreement: the two methods differ.
    """
    said = f"the simplest layout by the dynamic program is {standing}, by the integer program {answer}"
    if answer.status == "time limit":
        if answer.choice is not None and answer.simplicity is not None and answer.simplicity < standing.simplicity:
            raise Disagreement(said)
        return
    if answer.choice is None or answer.simplicity != standing.simplicity:
        raise Disagreement(said)
    if abs(answer.choice.objective_seconds - standing.seconds) > AGREEMENT * standing.seconds:
        raise Disagreement(said)


def _check_layout(found: Found, window: Window, standing: Standing, assigned: Assigned) -> None:
    """Check the layout: keys, step time and window must match the solvers' answer, and no layout may be simpler.

    Raises:
        Disagreement: one of these checks fails.
    """
    layout = found.layout_of(assigned)
    seconds, simplicity = estimate(found.job, layout).step_seconds, simplicity_of(found.job, layout)
    if simplicity != standing.simplicity or abs(seconds - standing.seconds) > AGREEMENT * seconds:
        raise Disagreement(f"the solvers saw {standing}, and the layout {layout} has {simplicity} and {seconds!r} s")
    if not _is_within(found, window, assigned):
        raise Disagreement(f"the layout {layout} takes {seconds!r} s, outside the window of {window.minimum}")
    tried = [each for each in found.layouts if _is_within(found, window, each)]
    alone = {id(each): _alone(configuration_keys(found.job, each.degrees.at_once())[0]) for each in tried}
    simplest = sorted(tried, key=lambda each: (alone[id(each)], each.seconds))[:_MOST_TRIED]
    for each in simplest:
        if alone[id(each)] <= standing.simplicity:
            other = simplicity_of(found.job, found.layout_of(each))
            if Standing(other, each.seconds) < Standing(standing.simplicity, standing.seconds * (1 - AGREEMENT)):
                raise Disagreement(f"{layout} is not the simplest: {found.layout_of(each)} has {other}")


def _is_within(found: Found, window: Window, assigned: Assigned) -> bool:
    """Whether a layout of the first solve is in the window."""
    devices = np.array([window.objective.devices(found.job, assigned.degrees)], dtype=np.float64)
    return bool(assigned.seconds <= window.longest_seconds(devices)[0] * (1 + AGREEMENT))
