"""The memory peak of the fullest stage, and the peak and step time of layouts that differ in one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from planner.fit import chance_words
from planner.show.columns import Columns, assignments
from planner.show.figures import bytes_scale
from planner.show.screen import clean, section
from planner.show.words import change, percent, terse_layout
from planner.sums import sum_of
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group, RenderableType

    from planner.explain.memory_band import MemoryBand
    from planner.explain.peak import Alternative, FittingChange, StagePeak
    from planner.plan import Plan


def peak_section(plan: Plan, peaks: Sequence[StagePeak], band: MemoryBand | None = None) -> Group:
    """Show the moment of the fullest stage's memory peak, and its activations at that moment."""
    fullest = plan.worst_stage
    peak = next(each for each in peaks if each.stage == fullest.stage)
    scale = bytes_scale(part.num_bytes for part in peak.activations)
    total = sum_of(part.num_bytes for part in peak.activations)
    rows = [(clean(part.name), scale(part.num_bytes), percent(part.num_bytes / total)) for part in peak.activations]
    free = fullest.limit_bytes - fullest.total_bytes
    left = f"{format_bytes(free)} are free" if free >= 0 else f"{format_bytes(-free)} are missing"
    count = f"{peak.microbatches_in_flight:,.4g}"
    words = f"{clean(peak.moment)}; {count} microbatch{'es' if count != '1' else ''} in flight"
    return section(
        f"Peak of stage {peak.stage}",
        Text(words),
        Text(f"One more microbatch in flight takes {format_bytes(peak.bytes_per_microbatch)}; {left}."),
        *([Text(_spread(band))] if band else []),
        Columns(rows, right=(1, 2), header=("activations", scale.unit, "share")),
    )


def _spread(band: MemoryBand) -> str:
    span = f"{format_bytes(band.low_bytes)} and {format_bytes(band.high_bytes)}"
    chance = f"at most the device's memory in {percent(band.chance_of_fitting)} of runs"
    return f"8 of 10 runs have the peak of stage {band.stage} between {span}; it is {chance}."


def _missing(found: Alternative) -> str:
    """State the memory that an alternative lacks, or its chance of fitting if it may fit."""
    over = f"{format_bytes(found.missing_bytes)} too much{' on the host' if found.missing_on_host else ''}"
    if found.verdict != "may not fit" or found.chance_of_fitting is None:
        return over
    return f"may not fit: {chance_words(found.chance_of_fitting)}"


def fitting_section(plan: Plan, changes: Sequence[FittingChange]) -> Group | None:
    """Show the smallest changes that make a layout fit into memory; None if the layout already fits."""
    if plan.fits is not False:
        return None
    if not changes:
        return section("What would make it fit", Text("no change of one key, or of two"))
    rows = [
        (
            Text(clean(each.change), style="bold"),
            format_seconds(each.step_seconds),
            change(each.step_seconds / plan.step_seconds - 1),
            chance_words(each.chance_of_fitting),
            assignments(terse_layout(each.layout)),
        )
        for each in changes
    ]
    table = Columns(rows, right=(1, 2, 3), wrap=(0, 4), header=("change", "step", "", "fits", "layout then"))
    return section("What would make it fit", table, note="single changes, then pairs; each one priced")


def alternatives_section(plan: Plan, alternatives: Sequence[Alternative]) -> Group | None:
    """Show peak, limit and step with one layout key changed at a time, or the rule that forbids the change."""
    if not alternatives:
        return None
    rows: list[list[RenderableType]] = []
    for each in alternatives:
        if each.peak_bytes is None or each.step_seconds is None:
            rows.append(
                [each.change, "", "", "", Text(f"against a rule: {clean('; '.join(each.broken_rules))}", style="dim")]
            )
            continue
        verdict = Text("fits") if each.fits else Text(_missing(each), style="bold red")
        slower = change(each.step_seconds / plan.step_seconds - 1)
        rows.append([each.change, format_bytes(each.peak_bytes), format_seconds(each.step_seconds), slower, verdict])
    header = ("change", "memory", "step", "", "")
    return section(
        "What else it could be, one change at a time", Columns(rows, right=(1, 2, 3), wrap=(0, 4), header=header)
    )
