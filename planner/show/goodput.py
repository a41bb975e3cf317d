"""Failures and checkpoints in words: their frequency, their cost, and the value of a spare host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from planner.cost.goodput import Goodput
    from planner.plan import Plan

_ENOUGH = 0.0005
"""A run that waits for repairs for less than this share of its time needs no further spare host."""


def checkpoint_words(plan: Plan) -> str:
    """State the size of a checkpoint, its parts, and the time in which the hosts write it together."""
    found = plan.checkpoint
    parts = f"weights {format_bytes(found.weight_bytes)}, optimizer {format_bytes(found.optimizer_bytes)}"
    rate = format_rate(found.bytes_per_second)
    return f"{format_bytes(found.num_bytes)} ({parts}); {format_seconds(found.seconds)} at {rate}"


def effective_words(plan: Plan) -> str:
    """State the share of the run that is kept, and what takes the rest; empty if failures are not counted."""
    found = plan.goodput
    if found is None:
        return ""
    return f"{found.effective_share:.1%} of the run{f'; {lost}' if (lost := _lost(found)) else ''}"


def goodput_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, text) rows on failures, checkpoints and spare hosts; empty if the plan has no goodput."""
    found = plan.goodput
    if found is None:
        return []
    each = found.interruptions
    blocked = f"stops training for {format_seconds(each.blocked)}"
    aside = f" and is written in {format_seconds(each.readable_after)}" if each.readable_after else ""
    best = found.interval_seconds == found.best_interval_seconds
    every = f"every {format_seconds(found.interval_seconds)}" + (", the best interval" if best else "")
    rows = [
        ("failures", f"one every {format_seconds(each.between)}; a restart takes {format_seconds(each.restart)}"),
        ("checkpoints", f"{every}: {format_bytes(found.checkpoint_bytes)}, {blocked}{aside}"),
        ("effective time", effective_words(plan)),
    ]
    if not best:
        gain = f"every {format_seconds(found.best_interval_seconds)} would be {found.best_effective_share:.1%}"
        rows.append(("best interval", gain))
    return [*rows, ("spare hosts", _spares(plan, found))]


def _lost(found: Goodput) -> str:
    shares = {
        "saving": found.checkpoint_share,
        "steps done again": found.lost_share,
        "restarts": found.restart_share,
        "waiting for hosts": found.waiting_share,
    }
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= _ENOUGH)


def _spares(plan: Plan, found: Goodput) -> str:
    """State how long the run waits for repairs with 0, 1, 2, ... spare hosts, until the wait is negligible."""
    given = plan.cluster.pools[0].failures.spare_hosts
    shares, told = found.waiting_by_spares, []
    for spares, share in shares:
        told.append(f"{spares}: {share:.1%}")
        if share < _ENOUGH:
            break
    assumed = "a replacement is assumed to be at hand; " if given is None else ""
    return f"{assumed}time spent waiting for repairs by number of spare hosts: {', '.join(told)}"
