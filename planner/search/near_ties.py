"""Among plans that are as good as equal: which one to recommend, and in what the others differ."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from planner.cost.estimate import Estimate, estimate
from planner.cost.stage import pool_indices
from planner.layout import Layout, shortened_list
from planner.plan import RunnerUp
from planner.search.objectives import THROUGHPUT
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from planner.search.objectives import Objective
    from planner.specs.job import Job

AS_GOOD = 0.001
"""A plan may be this much above the optimum, as a share, where it is simpler."""

NEAR_TIE = 0.03
"""Two layouts of one job whose forecasts differ by less than this may well be in the other order. Of 132 pairs of
layouts that a source ran on one job, those forecast so close came out in the forecast's order in 15 of 22 cases, the
others in 104 of 110 (docs/accuracy.md). The band of one forecast is much wider: what is wrong with it is wrong with
those of the same job's other layouts too."""

_NOTICEABLE = 0.001  # share of the step that a line must differ by to be a reason
_MOST_CAUSES = 2

_AXES = ("tp", "pp", "cp", "ep", "dp")
_HEADROOM_STEPS = 20  # memory counts in twentieths of a device: less is no reason to prefer a plan


def simplest(job: Job, layouts: Iterable[Layout]) -> Layout:
    """Of layouts that are as good as equal, best first, the simplest one; the first of equally simple ones.

    Fewer axes, then nothing offloaded, then fewer chunks of a stage, then a lower ZeRO stage, then fewer layers that
    are computed again, then more free memory, in steps of a twentieth of the device.
    """
    return min(layouts, key=lambda layout: _complexity(job, layout))


def _complexity(job: Job, layout: Layout) -> tuple[int, ...]:
    memory, pools, of_stage = estimate(job, layout).memory, job.pools, pool_indices(job, layout)
    free_share = min(
        1 - stage.total_bytes / pools[pool].cluster.device.memory for stage, pool in zip(memory, of_stage, strict=True)
    )
    return (*_parts(layout), -int(free_share * _HEADROOM_STEPS))


def _parts(layout: Layout) -> tuple[int, int, int, int, int]:
    chunks = zip(layout.layers_per_stage, layout.recompute, strict=True)
    return (
        sum(getattr(layout, axis) > 1 for axis in _AXES),
        int(layout.offload != "none"),
        layout.interleave,
        layout.zero,
        sum(layers for layers, policy in chunks if policy != "none"),
    )


def why_simpler(chosen: Layout, other: Layout) -> str:
    """What the chosen layout has less of; more free memory where that is all."""
    words = ("fewer axes", "nothing offloaded", "less interleaving", "a lower ZeRO stage", "less recompute")
    pairs = zip(_parts(chosen), _parts(other), words, strict=True)
    return next((word for mine, theirs, word in pairs if mine < theirs), "more free memory")


def differences(layout: Layout, other: Layout) -> str:
    """How `other` differs from `layout`, key by key: `pp 4 -> 8, dp 32 -> 16`."""
    parts = []
    for each in fields(Layout):
        mine, theirs = getattr(layout, each.name), getattr(other, each.name)
        if mine == theirs or each.name == "layers_per_stage":
            continue
        parts.append(f"{each.name} {_words(mine)} -> {_words(theirs)}")
    if not parts and layout.layers_per_stage != other.layers_per_stage:
        parts.append("other layers on each stage")
    return ", ".join(parts)


def _words(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(set(value)) == 1 else shortened_list("/".join(map(str, value)))


def near_tie(seconds: float, other_seconds: float) -> bool:
    """Whether two layouts of one job are so close that the forecasts may have them in the wrong order."""
    return max(seconds, other_seconds) <= (1 + NEAR_TIE) * min(seconds, other_seconds)


def runner_up(
    job: Job, winner: Layout, won: Estimate, layout: Layout, priced: Estimate, objective: Objective = THROUGHPUT
) -> RunnerUp:
    """A layout that lost by the objective, what it loses and saves against the winner, and in what it differs."""
    devices = objective.devices_of(job, winner), objective.devices_of(job, layout)
    mine, theirs = objective.rank(won.step_seconds, devices[0]), objective.rank(priced.step_seconds, devices[1])
    share = priced.step_seconds / won.step_seconds - 1
    heads = {
        "cost": f"{more_or_less(theirs[0] / mine[0] - 1, 'dearer', 'cheaper')}, {slower_by(share)}",
        "gpus": f"{layout.world_size - winner.world_size:+,} devices, {slower_by(share)}",
    }
    head = heads.get(objective.name) if devices[0] != devices[1] else None
    return RunnerUp(
        layout=layout,
        step_seconds=priced.step_seconds,
        peak_bytes=priced.peak_bytes,
        reason=": ".join(filter(None, (head or slower_by(share), _causes(won, priced)))),
        differs=differences(winner, layout),
        near_tie=near_tie(float(mine[0]), float(theirs[0])) and near_tie(float(mine[1]), float(theirs[1])),
    )


def _causes(won: Estimate, priced: Estimate) -> str:
    """`loses bubble 1.2 s; saves tp comm 0.4 s, memory 12 GiB`, from the lines that differ most."""
    longer = {
        line.name.value.replace("_", " "): float(line.exposed_seconds) - float(own.exposed_seconds)
        for line, own in zip(priced.time, won.time, strict=True)
    }
    most = sorted(longer, key=lambda name: -abs(longer[name]))
    shown = [name for name in most if abs(longer[name]) > _NOTICEABLE * won.step_seconds]
    loses = [f"{name} {format_seconds(longer[name])}" for name in shown if longer[name] > 0][:_MOST_CAUSES]
    saves = [f"{name} {format_seconds(-longer[name])}" for name in shown if longer[name] < 0][:_MOST_CAUSES]
    smaller = won.peak_bytes - priced.peak_bytes
    if smaller > won.peak_bytes / _HEADROOM_STEPS:
        saves.append(f"memory {format_bytes(smaller)}")
    causes = (("loses", loses), ("saves", saves))
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in causes if names)


def slower_by(share: float) -> str:
    """`4.3% slower`, `0.03% faster`, `as fast`."""
    return more_or_less(share, "slower", "faster") if abs(share) >= 5e-5 else "as fast"


def more_or_less(share: float, more: str, less: str) -> str:
    """`4.3% dearer`, `0.03% cheaper`: digits enough to see what there is."""
    digits = 2 if abs(share) < _NOTICEABLE else 1 if abs(share) < 0.0995 else 0
    return f"{abs(share):.{digits}%} {more if share > 0 else less}"
