"""Sections on the step as a waterfall, and on its rates, such as MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from planner.show.columns import Columns
from planner.show.figures import StepBar, seconds_scale
from planner.show.screen import clean, section
from planner.show.words import line_label, percent
from planner.units import format_flops

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Group, RenderableType

    from planner.explain.waterfall import Rate, TimePart, Waterfall
    from planner.plan import Plan


def waterfall_section(waterfall: Waterfall, slowest: str) -> Group:
    """Show each part as a bar that starts at the end of the previous bar; a part that saves time points backwards.

    slowest: the stage of the parts that are not computing, in words.
    """
    total = waterfall.step_seconds
    scale = seconds_scale([total])
    rows: list[list[RenderableType]] = []
    before = 0.0
    for part in waterfall.parts:
        start = before + min(part.seconds, 0.0)
        bar = StepBar(before_seconds=start, seconds=abs(part.seconds), full_seconds=total)
        share = percent(part.seconds / total)
        bound = Text(clean(part.bound), style="dim")
        rows.append([line_label(part.name), bar, scale(part.seconds), share, bound])
        before += part.seconds
    rows.append([Text("step", style="bold"), "", Text(scale(total), style="bold"), "100%"])
    table = Columns(rows, right=(2, 3), wrap=(1,), optional=(1, 4, 3), header=("", "", scale.unit, "share", "bound by"))
    return section(
        "From peak to predicted", table, note="; other ".join(filter(None, ("computing on the mean stage", slowest)))
    )


def own_parts(plan: Plan, waterfall: Waterfall) -> list[TimePart]:
    """Return the parts of the waterfall that are not lines of the ledger."""
    lines = {line.name.value for line in plan.time}
    return [part for part in waterfall.parts if part.name not in lines]


def part_formulas(parts: Iterable[TimePart]) -> Columns:
    """Show each part with its formula, the formula with numbers, and its source."""
    rows = [(line_label(part.name), formula_text(part.formula, part.numbers, part.source)) for part in parts]
    return Columns(rows, wrap=(1,))


def formula_text(formula: str, numbers: str, source: str) -> Text:
    """Format a formula, the formula with its numbers if any, and its source."""
    return Text.assemble(clean(formula), f"\n= {clean(numbers)}" if numbers else "", (f"\n{clean(source)}", "dim"))


def rates_section(rates: Iterable[Rate]) -> Group:
    """Show the speed of the step by each convention of counting FLOPs or tokens."""
    rows = [
        (
            clean(rate.name),
            f"{rate.share_of_peak:.1%}",
            f"{format_flops(rate.flops_per_second_per_device)}/s",
            Text(clean(rate.convention), style="dim"),
        )
        for rate in rates
    ]
    table = Columns(rows, right=(1, 2), wrap=(3,), optional=(3,), header=("", "of peak", "per device", "FLOPs counted"))
    return section("Rates", table)
