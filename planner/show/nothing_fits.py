"""Output of `planner plan` if no layout fits: the missing memory, its causes, and changes that make the job fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from planner.cost.ledger import worst_stage
from planner.show.columns import Columns, assignments
from planner.show.memory import memory_section
from planner.show.rows import host_words
from planner.show.screen import clean, section, stack
from planner.show.words import cluster_words, line_label, short_layout, stage_range
from planner.specs.banned import bans_of
from planner.sums import sum_of
from planner.units import format_bytes, format_count, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group, RenderableType

    from planner.answers.remedies import LiftedPin, Remedy
    from planner.cost.ledger import LineName
    from planner.plan import Plan


def nothing_fits(plan: Plan) -> Group:
    """Show the layout that comes nearest to fitting, and the largest part of its memory."""
    fullest, dominating = worst_stage(plan.memory), _dominating(plan)
    part = sum_of(float(line.num_bytes) for line in fullest.lines if line.name == dominating)
    over = f"{format_bytes(fullest.missing_bytes)} too much{'' if fullest.host_fits else ' on the host'}"
    rows: list[tuple[str, RenderableType]] = [
        ("needs", f"{format_bytes(fullest.total_bytes)} on {stage_range([fullest.stage])}, {over}"),
        ("chance", f"{chance_words(fullest.chance_of_fitting)} that it fits all the same"),
        ("largest part", f"{line_label(dominating)}, {format_bytes(part)}"),
        ("layout", assignments(short_layout(plan.layout))),
        *([("on the host", host)] if (host := host_words(plan.memory)) else []),
    ]
    head = Text.assemble(("Nothing fits: ", "bold red"), (clean(plan.model.name), "bold"))
    head.append(f" on {clean(cluster_words(plan.cluster))}")
    note, notes = f"limit {format_bytes(fullest.limit_bytes)}", _notes(plan)
    return stack(
        head,
        section("The smallest footprint found", Columns(rows, wrap=(1,))),
        memory_section((fullest,), note=note),
        section("Notes", *(Text(clean(each)) for each in notes)) if notes else None,
    )


def _dominating(plan: Plan) -> LineName:
    """The largest line of the fullest stage."""
    return max(worst_stage(plan.memory).lines, key=lambda line: float(line.num_bytes)).name


def _notes(plan: Plan) -> list[str]:
    """What the engine could do, and no program of it runs."""
    bans = bans_of(plan.engine).values() if plan.cluster.num_devices > 1 else ()
    return [f"engine {plan.engine.name}: {ban.words}; {ban.way_out}" for ban in bans]


def nothing_fits_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan document of the smallest footprint."""
    from planner.plan import plan_to_dict

    return {**plan_to_dict(plan), "dominating": str(_dominating(plan)), "notes": _notes(plan)}


def ways_out(remedies: Sequence[Remedy], pins: Sequence[LiftedPin], title: str, *, layouts: bool = True) -> Group:
    """Show the changes with which a layout fits, or does what else the title says, and the result without each pin.

    layouts: whether to show the layout that each of them leads to.
    """
    found = _remedies_section(remedies, title, layouts=layouts)
    return stack(found, _pins_section(pins, layouts=layouts) if pins else None)


def _remedies_section(remedies: Sequence[Remedy], title: str, *, layouts: bool) -> Group:
    if not remedies:
        return section(title, Text("no single change tried; a smaller model, more devices or another --engine"))
    rows = [(Text(clean(each.change), style="bold"), *_figures(each, layouts=layouts)) for each in remedies]
    header = ("change", "step", "tokens/s", "fits", "layout" * layouts)
    table = Columns(rows, right=(1, 2, 3), wrap=(0, 4), optional=(2,), header=header)
    return section(title, table, note="each one solved, cheapest first")


def _figures(remedy: Remedy, *, layouts: bool) -> tuple[RenderableType, ...]:
    layout = assignments(short_layout(remedy.layout) if layouts else "")
    chance = chance_words(remedy.chance_of_fitting)
    return format_seconds(remedy.step_seconds), format_count(remedy.tokens_per_second), chance, layout


def _pins_section(pins: Sequence[LiftedPin], *, layouts: bool) -> Group:
    """Show for each pin the result without this pin."""
    rows = [
        (
            Text(clean(each.constraint), style="bold"),
            _without(each),
            *(_figures(each.remedy, layouts=layouts) if each.remedy else ("",) * 4),
        )
        for each in pins
    ]
    header = ("pin", "without it", "step", "tokens/s", "fits", "layout" * layouts)
    return section("What each pin costs", Columns(rows, right=(2, 3, 4), wrap=(0, 5), optional=(3,), header=header))


def _without(pin: LiftedPin) -> str:
    """Return what the search without a pin finds."""
    if pin.remedy is not None or pin.least is None:
        return "fits" if pin.remedy else "no legal layout"
    over = pin.least.num_bytes - pin.least.limit_bytes
    return f"{format_bytes(over)} too much" if pin.least.share > 1 else "too slow"


def ways_out_to_dict(remedies: Sequence[Remedy], pins: Sequence[LiftedPin]) -> dict[str, Any]:
    """Return the changes that help, and the result without each pin, as plain data."""
    return {
        "remedies": [_remedy_to_dict(each) for each in remedies],
        "pins": [
            {
                "pin": each.constraint,
                "fits": each.remedy is not None or (each.least is not None and each.least.share <= 1),
                "least_bytes": None if each.least is None else each.least.num_bytes,
                "limit_bytes": None if each.least is None else each.least.limit_bytes,
                "remedy": None if each.remedy is None else _remedy_to_dict(each.remedy),
            }
            for each in pins
        ],
    }


def _remedy_to_dict(remedy: Remedy) -> dict[str, Any]:
    from planner.plan import layout_to_dict

    return {
        "change": remedy.change,
        "step_seconds": remedy.step_seconds,
        "tokens_per_second": remedy.tokens_per_second,
        "chance_of_fitting": remedy.chance_of_fitting,
        "num_devices": remedy.layout.world_size,
        "layout": layout_to_dict(remedy.layout),
    }
