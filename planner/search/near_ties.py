"""Among plans that are as good as equal: which one to recommend, and in what the others differ."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from planner.cost.band import band
from planner.cost.estimate import Estimate, estimate
from planner.layout import Layout
from planner.plan import RunnerUp
from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from planner.cost.band import Band
    from planner.specs.job import Job

__all__ = ["AS_GOOD", "differences", "near_tie", "runner_up", "simplest", "why_simpler"]

AS_GOOD = 0.001
"""A plan may be this much above the optimum, as a share, where it is simpler."""

_AXES = ("tp", "pp", "cp", "ep", "dp")
_HEADROOM_STEPS = 20  # memory counts in twentieths of a device: less is no reason to prefer a plan


def simplest(job: Job, layouts: Iterable[Layout]) -> Layout:
    """Of layouts that are as good as equal, best first, the simplest one; the first of equally simple ones.

    Fewer axes, then no interleaving, then a lower ZeRO stage, then fewer layers that are computed again, then more
    free memory, in steps of a twentieth of the device.
    """
    return min(layouts, key=lambda layout: _complexity(job, layout))


def _complexity(job: Job, layout: Layout) -> tuple[int, ...]:
    free_share = 1 - estimate(job, layout).peak_bytes / job.cluster.device.memory
    return (*_parts(layout), -int(free_share * _HEADROOM_STEPS))


def _parts(layout: Layout) -> tuple[int, int, int, int]:
    chunks = zip(layout.layers_per_stage, layout.recompute, strict=True)
    return (
        sum(getattr(layout, axis) > 1 for axis in _AXES),
        int(layout.interleave > 1),
        layout.zero,
        sum(layers for layers, policy in chunks if policy != "none"),
    )


def why_simpler(chosen: Layout, other: Layout) -> str:
    """What the chosen layout has less of; more free memory where that is all."""
    words = ("fewer axes", "no interleaving", "a lower ZeRO stage", "less recompute")
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
    return str(value[0]) if len(set(value)) == 1 else "mixed"


def near_tie(spread: Band | None, seconds: float, other_seconds: float) -> bool:
    """Whether error bands of the same width around two step times overlap; without a band only equal times do."""
    low, high = (spread.low, spread.high) if spread else (1.0, 1.0)
    slower, faster = max(seconds, other_seconds), min(seconds, other_seconds)
    return slower * low <= faster * high


def runner_up(job: Job, winner: Layout, won: Estimate, layout: Layout) -> RunnerUp:
    """A layout that lost, the two lines that cost it most against the winner, and in what it differs."""
    priced = estimate(job, layout)
    worse = {
        line.name: float(line.exposed_seconds) - float(own.exposed_seconds)
        for line, own in zip(priced.time, won.time, strict=True)
    }
    most = sorted((name for name in worse if worse[name] > 0), key=lambda name: -worse[name])[:2]
    share = priced.step_seconds / won.step_seconds - 1
    causes = ", ".join(f"{name.value.replace('_', ' ')} +{format_seconds(worse[name])}" for name in most)
    return RunnerUp(
        layout=layout,
        step_seconds=priced.step_seconds,
        peak_bytes=priced.peak_bytes,
        reason=f"{share:+.1%}" + (f": {causes}" if causes and share > 0 else ""),
        differs=differences(winner, layout),
        near_tie=near_tie(band(job, winner), won.step_seconds, priced.step_seconds),
    )
