"""Every line of a plan's ledger and waterfall with its formula, numbers and source, for the page and the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from planner.show.columns import Columns
from planner.show.screen import clean, section
from planner.show.words import line_label, stage_range
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Group

    from planner.answers.waterfall import TimePart, Waterfall
    from planner.cost.ledger import MemoryLine, TimeLine
    from planner.plan import Plan


def ledger_rows(plan: Plan, waterfall: Waterfall) -> list[dict[str, str]]:
    """Return every line of time, of the waterfall beyond the lines of time, and of memory, in words.

    Lines of memory with one formula share a row, which has the least and the largest value of all stages.
    """
    numbers = {part.name: part.numbers for part in waterfall.parts}
    seconds = {line.name: float(line.hidden_seconds) for line in plan.time}
    hidden = {name: f"{format_seconds(each)} hidden" if each else "" for name, each in seconds.items()}
    rows = [
        _row(line, of="time", where=f"stage {line.stage}", value=format_seconds(float(line.exposed_seconds)))
        | {"numbers": numbers.pop(line.name, ""), "more": hidden[line.name], "bound": line.bound}
        for line in plan.time
    ]
    rows += [
        _row(part, of="waterfall", where="mean stage", value=format_seconds(part.seconds))
        | {"numbers": part.numbers, "bound": part.bound}
        for part in waterfall.parts
        if part.name in numbers
    ]
    kinds: dict[tuple[str, str, str], list[tuple[int, MemoryLine]]] = {}
    for stage in plan.memory:
        for each in stage.lines:
            kinds.setdefault((each.name, each.formula, each.source), []).append((stage.stage, each))
    order = [line.name for line in plan.memory[0].lines]
    for found in sorted(kinds.values(), key=lambda found: order.index(found[0][1].name)):
        sizes = [float(each.num_bytes) for _, each in found]
        value = dict.fromkeys(map(format_bytes, (min(sizes), max(sizes))))
        where = stage_range([stage for stage, _ in found])
        rows.append(_row(found[0][1], of="memory", where=where, value=" to ".join(value)))
    return rows


def _row(line: TimeLine | MemoryLine | TimePart, **cells: str) -> dict[str, str]:
    same = {"name": line_label(line.name), "formula": line.formula, "source": line.source}
    return {"numbers": "", "more": "", "bound": ""} | same | cells


_TITLES: Final = {"memory": "memory", "waterfall": "the waterfall", "time": "time"}


def formula_sections(plan: Plan, waterfall: Waterfall) -> list[Group]:
    """Show the formulas of memory, waterfall and time; no plan communicates along every axis."""
    silent = {line_label(line.name) for line in plan.time if line.busy_seconds <= 0}
    rows = ledger_rows(plan, waterfall)
    shown = {of: [row for row in rows if row["of"] == of and row["name"] not in silent] for of in _TITLES}
    return [
        section(f"Formulas of {title}", Columns([(row["name"], _formula(row)) for row in shown[of]], wrap=(1,)))
        for of, title in _TITLES.items()
    ]


def _formula(row: dict[str, str]) -> Text:
    """Return a formula, the formula with its numbers if any, and its source."""
    numbers = f"\n= {clean(row['numbers'])}" if row["numbers"] else ""
    return Text.assemble(clean(row["formula"]), numbers, (f"\n{clean(row['source'])}", "dim"))
