"""Section on the fastest layout for each size of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from planner.show.columns import Columns, assignments
from planner.show.screen import clean, section
from planner.show.words import line_label, short_layout
from planner.units import format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from planner.explain.scaling import Scaling


def scaling_section(found: Scaling) -> Group:
    """Show step time, tokens per second and efficiency of each size, and the ledger line that grew most."""
    rows: list[list[RenderableType]] = []
    for each in found.sizes:
        if each.step_seconds is None or each.tokens_per_second is None or each.efficiency is None:
            rows.append([f"{each.num_devices:,}", "", "", "", "", Text(clean(each.missing or ""), style="dim")])
            continue
        grown = f"{line_label(each.grown_line)} {each.grown_share:.1%}" if each.grown_line else ""
        layout = assignments(short_layout(each.layout) if each.layout else "")
        speed = format_count(each.tokens_per_second)
        time = format_seconds(each.step_seconds)
        rows.append([f"{each.num_devices:,}", time, speed, f"{each.efficiency:.0%}", grown, layout])
    header = ("devices", "step", "tokens/s", "of linear", "lost most to", "layout")
    table = Columns(rows, right=(0, 1, 2, 3), wrap=(5,), optional=(5,), header=header)
    return section(
        "Scaling", table, Text(_verdict(found)), note="the fastest layout for each size, the same global batch"
    )


def _verdict(found: Scaling) -> str:
    if found.most_efficient is None:
        return "Nothing fits on any of these sizes."
    best = f"Linear is the speed per device of the most efficient size, {found.most_efficient:,} devices."
    lost = "Lost most to: what grew most in device seconds against that size, over those of the whole step."
    if found.breaks_at is None:
        return f"{best} {lost} No size above it falls below 80 %."
    by = f", by {line_label(found.breaks_by)}" if found.breaks_by else ""
    return f"{best} {lost} At {found.breaks_at:,} devices it falls below 80 %{by}."
