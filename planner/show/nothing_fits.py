"""What `planner plan` prints when no layout fits: how far off it is, what is in the way, and what would fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.text import Text

from planner.show.columns import Columns, assignments
from planner.show.screen import clean, section, stack
from planner.show.summary import memory_section
from planner.show.words import cluster_words, line_label, short_layout, stage_range
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group, RenderableType

    from planner.plan import Plan
    from planner.search.footprint import NothingFits
    from planner.search.remedies import Remedy
    from planner.specs.job import Job

__all__ = ["nothing_fits", "nothing_fits_to_dict"]


def nothing_fits(job: Job, found: NothingFits, remedies: Sequence[Remedy]) -> Group:
    """The smallest footprint that was found, its largest part, and the cheapest changes that fit."""
    fullest = max(found.memory, key=lambda stage: stage.total_bytes - stage.limit_bytes)
    part = sum(float(line.num_bytes) for line in fullest.lines if line.name == found.dominating)
    over = fullest.total_bytes - fullest.limit_bytes
    rows: list[tuple[str, RenderableType]] = [
        (
            "needs",
            f"{format_bytes(fullest.total_bytes)} on {stage_range([fullest.stage])}, {format_bytes(over)} too much",
        ),
        ("largest part", f"{line_label(found.dominating)}, {format_bytes(part)}"),
        ("layout", assignments(short_layout(found.layout))),
    ]
    head = Text.assemble(("Nothing fits: ", "bold red"), (clean(job.model.name), "bold"))
    head.append(f" on {clean(cluster_words(job.cluster))}")
    note = f"limit {format_bytes(fullest.limit_bytes)}"
    return stack(
        head,
        section("The smallest footprint found", Columns(rows, wrap=(1,))),
        memory_section(found.memory, note=note),
        _remedies_section(remedies),
        section("Notes", *(Text(clean(each)) for each in found.notes)) if found.notes else None,
    )


def _remedies_section(remedies: Sequence[Remedy]) -> Group:
    if not remedies:
        return section("What would fit", Text("no single change that was tried; a smaller model or more devices"))
    rows = [
        (
            Text(clean(each.change), style="bold"),
            format_seconds(each.step_seconds),
            short_layout(each.layout, stages=False),
        )
        for each in remedies
    ]
    return section("What would fit", Columns(rows, right=(1,), wrap=(0, 2), header=("change", "step", "layout")))


def nothing_fits_to_dict(priced: Plan, found: NothingFits, remedies: Sequence[Remedy]) -> dict[str, Any]:
    """The plan document of the smallest footprint, with `"fits": false` and what would fit."""
    from planner.plan import layout_to_dict, plan_to_dict

    changes = [
        {"change": each.change, "step_seconds": each.step_seconds, "layout": layout_to_dict(each.layout)}
        for each in remedies
    ]
    return {
        **plan_to_dict(priced),
        "fits": False,
        "dominating": str(found.dominating),
        "remedies": changes,
        "notes": list(found.notes),
    }


def nothing_fits_to_json(priced: Plan, found: NothingFits, remedies: Sequence[Remedy]) -> str:
    """`nothing_fits_to_dict` as text."""
    return json.dumps(nothing_fits_to_dict(priced, found, remedies), indent=1, allow_nan=False) + "\n"
