"""The difference of two plans, and the result of planning an alternative."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from planner.layout import shortened_list
from planner.show.columns import Columns, assignments
from planner.show.figures import bytes_scale, seconds_scale
from planner.show.screen import clean, indented, section, stack
from planner.show.words import change, line_label, short_layout, stage_range
from planner.sums import sum_of
from planner.units import format_bytes, format_count, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from planner.explain.difference import ChangedValue, Difference, LineDifference, PlanFigures
    from planner.explain.outcome import Outcome, Shortfall
    from planner.show.figures import Scale

_MOST_INPUTS = 20


def difference_view(found: Difference, *, names: tuple[str, str]) -> Group:
    """Output of `planner diff`: the totals, layout keys, lines of both ledgers and inputs that differ."""
    return stack(
        section("Totals", *_reasons(found), _totals(found, names)),
        *_ledgers(found, names),
        _inputs(found.inputs, names),
    )


def _inputs(changes: Sequence[ChangedValue], names: tuple[str, str]) -> Group | None:
    """Show input values that differ; of two documents with different names, show only the names."""
    if not changes:
        return None
    renamed = [path.removesuffix("name") for each in changes if (path := each.path).endswith(".name")]
    inside = [each for each in changes if any(each.path.startswith(p) and each.path != f"{p}name" for p in renamed)]
    shown = [each for each in changes if each not in inside][:_MOST_INPUTS]
    left = len(changes) - len(shown)
    note = f"{left:,} more differ inside these documents, --json has all" if left else ""
    return section("Inputs", _changes(shown, names), note=note)


def outcome_body(outcome: Outcome, *, names: tuple[str, str]) -> list[RenderableType]:
    """Show the rules that forbid the alternative, or the memory that it lacks, or its difference from the plan."""
    if outcome.rules:
        heading = Text("No legal layout:", style="bold red")
        return [indented(Group(heading, *(indented(Text(clean(rule))) for rule in outcome.rules)))]
    if outcome.shortfall:
        return [indented(_shortfall(outcome.shortfall))]
    assert outcome.difference is not None, "an outcome is one of three"
    found = outcome.difference
    if found.before.layout == found.after.layout and found.before.step_seconds == found.after.step_seconds:
        return [indented(Text("The plan is this already."))]
    return [*map(indented, [*_reasons(found), _totals(found, names)]), *map(indented, _ledgers(found, names))]


def _reasons(found: Difference) -> list[RenderableType]:
    """Say why step times are not compared."""
    return [Text(clean(f"Step times are not compared: {each}."), style="bold") for each in found.not_compared]


def _shortfall(found: Shortfall) -> Group:
    rows: list[tuple[str, RenderableType]] = [
        ("nearest", assignments(short_layout(found.layout))),
        ("needs", f"{format_bytes(found.needed_bytes)} on {stage_range([found.stage])}"),
        ("chance", chance_words(found.chance_of_fitting)),
        ("limit", format_bytes(found.limit_bytes)),
        ("largest line", f"{line_label(found.largest_line)}, {format_bytes(found.largest_line_bytes)}"),
    ]
    where = " in the host's memory" if found.missing_on_host else ""
    words = f"{found.verdict.capitalize()}: {format_bytes(found.missing_bytes)} too much{where}"
    heading = Text(words, style="bold red")
    return Group(heading, indented(Columns(rows, wrap=(1,))))


def _totals(found: Difference, names: tuple[str, str]) -> Columns:
    before, after = found.before, found.after
    rows: list[list[RenderableType]] = [
        ["step", format_seconds(before.step_seconds), format_seconds(after.step_seconds)],
        [
            "tokens/s per device",
            format_count(before.tokens_per_second_per_device),
            format_count(after.tokens_per_second_per_device),
        ],
        ["MFU", f"{before.mfu:.1%}", f"{after.mfu:.1%}"],
        ["peak", format_bytes(before.peak_bytes), format_bytes(after.peak_bytes)],
        ["limit", format_bytes(before.limit_bytes), format_bytes(after.limit_bytes)],
        ["devices", f"{before.num_devices:,}", f"{after.num_devices:,}"],
        ["memory", *(_verdict(each) for each in (before, after))],
    ]
    ratios = [
        after.step_seconds / before.step_seconds,
        after.tokens_per_second_per_device / before.tokens_per_second_per_device,
        after.mfu / before.mfu,
        after.peak_bytes / before.peak_bytes,
        after.limit_bytes / before.limit_bytes,
        after.num_devices / before.num_devices,
    ]
    silent = ("step", "tokens/s per device", "MFU") if found.not_compared else ()
    shown = [[*row, "" if row[0] in silent else change(ratio - 1)] for row, ratio in zip(rows, ratios, strict=False)]
    return Columns([*shown, rows[-1]], right=(1, 2, 3), header=("", *map(clean, names), "change"))


def _verdict(figures: PlanFigures) -> Text:
    words = f"{figures.verdict}, {chance_words(figures.chance_of_fitting)}"
    return Text(words, style="" if figures.fits else "bold red")


def _changes(changes: Sequence[ChangedValue], names: tuple[str, str]) -> Columns:
    rows = [
        (clean(each.path), *(clean(shortened_list(v or "-")) for v in (each.before, each.after))) for each in changes
    ]
    return Columns(rows, wrap=(0, 1, 2), header=("", *map(clean, names)))


def _ledgers(found: Difference, names: tuple[str, str]) -> list[RenderableType]:
    """Show the layout keys, time lines and memory lines that differ."""
    seconds = seconds_scale([found.before.step_seconds, found.after.step_seconds])
    size = bytes_scale([found.before.peak_bytes, found.after.peak_bytes])
    stages = {found.before.fullest_stage, found.after.fullest_stage}
    note = f"of {stage_range(sorted(stages))}" if len(stages) == 1 else "of the fullest stage of each"
    parts = [
        section("Layout", _changes(found.layout, names)) if found.layout else None,
        None
        if found.not_compared
        else _lines(found.time, seconds, names, f"Time, {seconds.unit}", note="of the slowest stage of each"),
        _lines(found.memory, size, names, f"Memory, {size.unit}", note=note),
    ]
    return [part for part in parts if part is not None]


def _lines(
    lines: Sequence[LineDifference], scale: Scale, names: tuple[str, str], title: str, note: str = ""
) -> Group | None:
    """Show the lines that differ, the sum of the other lines, and the total; None if no line differs."""
    differ = [each for each in lines if _signed(each.after - each.before, scale) != "-"]
    if not differ:
        return None
    alike = [each for each in lines if each not in differ]
    rows: list[list[RenderableType]] = [[*_row(line_label(each.name), [each], scale)] for each in differ]
    if any(each.before or each.after for each in alike):
        rows.append([*_row("all others", alike, scale)])
    *total, difference = _row("total", lines, scale)
    rows.append([*(Text(cell, "bold") for cell in total), difference])
    return section(title, Columns(rows, right=(1, 2, 3), header=("", *map(clean, names), "difference")), note=note)


def _row(name: str, lines: Sequence[LineDifference], scale: Scale) -> list[str]:
    before, after = sum_of(each.before for each in lines), sum_of(each.after for each in lines)
    return [name, scale(before), scale(after), _signed(after - before, scale)]


def _signed(value: float, scale: Scale) -> str:
    """Format a difference with its sign; a difference that rounds to zero becomes a dash."""
    text = scale(abs(value))
    return ("+" if value > 0 else "-") + text if text.strip("0.,") not in ("", "-") else "-"
