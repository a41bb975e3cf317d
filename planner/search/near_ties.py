"""Compare two layouts: the keys that differ, what is better in one of them, and the reason why one loses."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.cost.estimate import Estimate, estimate
from planner.layout import Layout, shortened_list
from planner.plan import Minimum, RunnerUp
from planner.search.objectives import THROUGHPUT
from planner.search.ranking import keys_of
from planner.specs.yaml import shipped_yaml
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.plan_parts import Keys
    from planner.search.objectives import Objective
    from planner.specs.job import Job

NEAR_TIE = 0.03
"""If the forecasts of two layouts for one job differ by less than this share, the real order may be the opposite.

The evidence is pairs of layouts that a source ran on one job. The forecast's order is right for 63 % of 793 pairs below
this share, and for 93 % of 17,963 other pairs (`planner accuracy --json`). The band of one forecast is much wider,
because the forecasts of one job's layouts share most of their error.
"""

_NOTICEABLE = 0.001  # a ledger line is given as a reason if it differs by more than this share of the step
_LESS_MEMORY = 0.05  # saved memory is given as a reason above this share of the plan's memory

_WORDS: Final[Any] = shipped_yaml(Path(__file__).with_suffix(".yaml")).plain
"""The values of each key of the ranking in words: a text, or one for each value."""


def simpler_in(chosen: Keys, other: Keys) -> str:
    """The first key in which `chosen` is better than `other`, with both values in words; empty if there is none."""
    for key, mine in asdict(chosen).items():
        theirs = getattr(other, key)
        if mine < theirs:
            return f"{_of_key(key, mine)} in place of {_of_key(key, theirs)}"
        if mine > theirs:
            break
    return ""


def _of_key(key: str, value: int) -> str:
    words = _WORDS[key]
    if isinstance(words, str):
        return words.format(value, s="s" * (value != 1), es="is" if value == 1 else "es")
    return str(words[value])


def minimum(job: Job, chosen: Layout, mine: Estimate, best: Layout, objective: Objective) -> Minimum:
    """The best layout by the objective, with its price and its differences from the chosen layout, priced as `mine`."""
    priced = mine if best == chosen else estimate(job, best)
    keys, least = keys_of(job, chosen), keys_of(job, best)
    ranks = [
        objective.rank(each.step_seconds, objective.devices_of(job, layout))
        for each, layout in ((mine, chosen), (priced, best))
    ]
    above = max(float(one / other) - 1 for one, other in zip(*ranks, strict=True))
    return Minimum(
        layout=best,
        step_seconds=priced.step_seconds,
        peak_bytes=priced.peak_bytes,
        keys=least,
        above=0.0 if chosen == best else above,
        reason=simpler_in(keys, least),
    )


def differences(layout: Layout, other: Layout) -> str:
    """How `other` differs from `layout`, key by key: `pp 4 -> 8, dp 32 -> 16`; first the devices, if fewer or more."""
    sizes = layout.world_size, other.world_size
    parts = [f"devices {sizes[0]:,} -> {sizes[1]:,}"] if sizes[0] != sizes[1] else []
    for each in fields(Layout):
        mine, theirs = _words(getattr(layout, each.name)), _words(getattr(other, each.name))
        if mine != theirs and each.name != "layers_per_stage":
            parts.append(f"{each.name} {mine} -> {theirs}")
    if not parts and layout.layers_per_stage != other.layers_per_stage:
        parts.append("other layers on each stage")
    return ", ".join(parts)


def _words(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(set(value)) == 1 else shortened_list("/".join(map(str, value)))


def near_tie(seconds: float, other_seconds: float) -> bool:
    """Whether the forecasts of two layouts of one job are too close to decide which is faster."""
    return max(seconds, other_seconds) <= (1 + NEAR_TIE) * min(seconds, other_seconds)


def runner_up(
    job: Job, winner: Layout, won: Estimate, layout: Layout, priced: Estimate, objective: Objective = THROUGHPUT
) -> RunnerUp:
    """A runner-up: a layout that lost to the winner, the main reason, and the keys in which the two differ."""
    devices = objective.devices_of(job, winner), objective.devices_of(job, layout)
    mine, theirs = objective.rank(won.step_seconds, devices[0]), objective.rank(priced.step_seconds, devices[1])
    share = priced.step_seconds / won.step_seconds - 1
    heads = {
        "cost": f"{more_or_less(theirs[0] / mine[0] - 1, 'dearer', 'cheaper')}, {slower_by(share)}",
        "gpus": f"{layout.world_size - winner.world_size:+,} devices, {slower_by(share)}",
    }
    head = heads.get(objective.name) if devices[0] != devices[1] else None
    fits = f", {priced.verdict}" if won.fits and not priced.fits else ""
    less_simple = simpler_in(keys_of(job, winner), keys_of(job, layout)) if theirs < mine else ""
    why = f"the plan has {less_simple}" if less_simple else _cause(won, priced)
    return RunnerUp(
        layout=layout,
        step_seconds=priced.step_seconds,
        peak_bytes=priced.peak_bytes,
        reason=": ".join(filter(None, ((head or slower_by(share)) + fits, why))),
        differs=differences(winner, layout),
        near_tie=near_tie(float(mine[0]), float(theirs[0])) and near_tie(float(mine[1]), float(theirs[1])),
    )


def _cause(won: Estimate, priced: Estimate) -> str:
    """The ledger line that differs most and the sum of the others: `loses bubble 1.2 s, saves 0.9 s elsewhere`.

    The line is a saving if the layout is not slower.
    """
    longer = {
        line.name.value.replace("_", " "): float(line.exposed_seconds) - float(own.exposed_seconds)
        for line, own in zip(priced.time, won.time, strict=True)
    }
    sign, least = 1 if priced.step_seconds > won.step_seconds else -1, _NOTICEABLE * won.step_seconds
    name = max(longer, key=lambda each: sign * longer[each])
    if sign * longer[name] > least:
        rest = priced.step_seconds - won.step_seconds - longer[name]
        verbs = {1: "loses", -1: "saves"}
        also = "and" if sign * rest > 0 else verbs[-sign]
        elsewhere = f", {also} {format_seconds(abs(rest))} elsewhere" if abs(rest) > least else ""
        return f"{verbs[sign]} {name} {format_seconds(abs(longer[name]))}{elsewhere}"
    smaller = won.peak_bytes - priced.peak_bytes
    return f"saves memory {format_bytes(smaller)}" if smaller > _LESS_MEMORY * won.peak_bytes else ""


def slower_by(share: float) -> str:
    """The difference of two step times in words: `4.3% slower`, `0.03% faster`, or `as fast`."""
    return more_or_less(share, "slower", "faster") if abs(share) >= 5e-5 else "as fast"


def more_or_less(share: float, more: str, less: str) -> str:
    """A difference in words, such as `4.3% dearer` or `0.03% cheaper`, with enough digits to show the difference."""
    digits = 2 if abs(share) < _NOTICEABLE else 1 if abs(share) < 0.0995 else 0
    return f"{abs(share):.{digits}%} {more if share > 0 else less}"
