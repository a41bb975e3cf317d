"""Compare two plans: inputs, layout, and the ledgers line by line."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field
from rich.text import Text

from planner.cost.ledger import LineName, Verdict
from planner.cost.transfers import unmeasured_dispatch
from planner.layout import shortened_list
from planner.plan import layout_to_dict, plan_to_dict
from planner.plan_parts import WrittenLayout
from planner.show.columns import Columns
from planner.show.figures import bytes_scale, seconds_scale
from planner.show.screen import clean, indented, section, stack
from planner.show.words import change, line_label, stage_range
from planner.specs.document import Document
from planner.sums import sum_of
from planner.units import format_bytes, format_count, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Group, RenderableType

    from planner.plan import Plan
    from planner.show.figures import Scale


class ChangedValue(Document):
    """A document's value that differs, with its path; null if one side lacks the value."""

    path: str
    before: str | None
    after: str | None


class LineDifference(Document):
    """A line of the ledger on both sides: exposed seconds of the step, or bytes of the fullest stage."""

    name: str
    before: float
    after: float


class PlanFigures(Document):
    """The totals of a plan."""

    layout: WrittenLayout
    fits: bool | None
    verdict: Verdict
    chance_of_fitting: float | None
    num_devices: int = Field(description="devices that the layout uses")
    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    peak_bytes: float = Field(description="bytes of the stage that is least likely to fit")
    fullest_stage: int
    limit_bytes: float


class Difference(Document):
    """The differences between two plans; time lines in seconds, memory lines in bytes of the fullest stage.

    not_compared: why no published run tells which step is shorter; empty if runs do.
    """

    before: PlanFigures
    after: PlanFigures
    inputs: tuple[ChangedValue, ...]
    layout: tuple[ChangedValue, ...]
    time: tuple[LineDifference, ...]
    memory: tuple[LineDifference, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether an input, the layout, a line or a total differs."""
        lines = any(each.before != each.after for each in (*self.time, *self.memory))
        return bool(self.inputs or self.layout or lines or self.before != self.after)


def figures_of(plan: Plan) -> PlanFigures:
    """The totals of a plan."""
    fullest = plan.worst_stage
    return PlanFigures.of(
        plan,
        num_devices=plan.layout.world_size,
        peak_bytes=fullest.total_bytes,
        fullest_stage=fullest.stage,
        limit_bytes=fullest.limit_bytes,
    )


def difference_of(before: Plan, after: Plan) -> Difference:
    """All differences between two plans, and every ledger line that at least one of the plans has."""
    return Difference(
        before=figures_of(before),
        after=figures_of(after),
        inputs=tuple(_changes(_inputs(before), _inputs(after))),
        layout=tuple(_changes(layout_to_dict(before.layout), layout_to_dict(after.layout))),
        time=_lines(_seconds(before), _seconds(after)),
        memory=_lines(_bytes(before), _bytes(after)),
        not_compared=not_compared(before, after),
    )


def not_compared(before: Plan, after: Plan) -> tuple[str, ...]:
    """Why the step times of two plans are not compared; empty if they are.

    A correction that rests on one family of publishers may be the age of its runs, and not a property of the engine.
    """
    found = []
    if before.engine.name != after.engine.name:
        alone = {plan.engine.name: plan.band.family for plan in (before, after) if plan.band and plan.band.family}
        found = [f"the corrections of {engine} rest on one family of publishers, {alone[engine]}" for engine in alone]
    once = [plan.engine.communication.dispatches_once_per_host for plan in (before, after)]
    link = max(unmeasured_dispatch(p.model, p.engine, p.cluster.pools[0], p.layout) for p in (before, after))
    if once[0] != once[1] and link:
        found.append(f"the gain of DeepEP or HybridEP over an all-to-all is not measured on {link}")
    return tuple(found)


def _inputs(plan: Plan) -> dict[str, Any]:
    document = plan_to_dict(plan)
    return {key: document[key] for key in ("model", "cluster", "training", "engine", "calibration", "options")}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[ChangedValue]:
    flat_before, flat_after = dict(_flat(before)), dict(_flat(after))
    for path in dict.fromkeys(chain(flat_before, flat_after)):
        one, other = flat_before.get(path), flat_after.get(path)
        if one != other:
            yield ChangedValue(path=path, before=one, after=other)


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a document with their paths; a list of plain values is one leaf."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list | tuple) and any(isinstance(each, dict) for each in data):
        for index, value in enumerate(data):
            name = value.get("name", index) if isinstance(value, dict) else index
            yield from _flat(value, f"{path}.{name}")
    elif isinstance(data, list | tuple):
        words = list(map(str, data))
        yield path, words[0] if words and len(set(words)) == 1 else "/".join(words)
    elif data is not None:
        yield path, str(data)


def _seconds(plan: Plan) -> dict[str, float]:
    return {line.name.value: float(line.exposed_seconds) for line in plan.time}


def _bytes(plan: Plan) -> dict[str, float]:
    fullest = figures_of(plan).fullest_stage
    lines = next(stage.lines for stage in plan.memory if stage.stage == fullest)
    return {line.name.value: float(line.num_bytes) for line in lines}


def _lines(before: dict[str, float], after: dict[str, float]) -> tuple[LineDifference, ...]:
    order = [name.value for name in LineName]
    names = sorted({*before, *after}, key=order.index)
    return tuple(LineDifference(name=name, before=before.get(name, 0.0), after=after.get(name, 0.0)) for name in names)


_MOST_INPUTS = 20


def difference_view(found: Difference, *, names: tuple[str, str]) -> Group:
    """Output of `planner diff`: the totals, layout keys, lines of both ledgers and inputs that differ."""
    return stack(
        section("Totals", *_reasons(found), _totals(found, names)),
        *_ledgers(found, names),
        _input_section(found.inputs, names),
    )


def _input_section(changes: Sequence[ChangedValue], names: tuple[str, str]) -> Group | None:
    """Show input values that differ; of two documents with different names, show only the names."""
    if not changes:
        return None
    renamed = [path.removesuffix("name") for each in changes if (path := each.path).endswith(".name")]
    inside = [each for each in changes if any(each.path.startswith(p) and each.path != f"{p}name" for p in renamed)]
    shown = [each for each in changes if each not in inside][:_MOST_INPUTS]
    left = len(changes) - len(shown)
    note = f"{left:,} more differ inside these documents, --json has all" if left else ""
    return section("Inputs", _change_rows(shown, names), note=note)


def difference_body(found: Difference, *, names: tuple[str, str]) -> list[RenderableType]:
    """Show the totals and the lines of both ledgers that differ."""
    return [*map(indented, [*_reasons(found), _totals(found, names)]), *map(indented, _ledgers(found, names))]


def _reasons(found: Difference) -> list[RenderableType]:
    """Say why step times are not compared."""
    return [Text(clean(f"Step times are not compared: {each}."), style="bold") for each in found.not_compared]


_TOTALS: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("step", "step_seconds", format_seconds),
    ("tokens/s per device", "tokens_per_second_per_device", format_count),
    ("MFU", "mfu", "{:.1%}".format),
    ("peak", "peak_bytes", format_bytes),
    ("limit", "limit_bytes", format_bytes),
    ("devices", "num_devices", "{:,}".format),
)
"""Rows of totals: the name, the field of `PlanFigures`, and the form."""


def _totals(found: Difference, names: tuple[str, str]) -> Columns:
    silent = ("step", "tokens/s per device", "MFU") if found.not_compared else ()
    rows: list[list[RenderableType]] = []
    for name, key, form in _TOTALS:
        before, after = getattr(found.before, key), getattr(found.after, key)
        rows.append([name, form(before), form(after), "" if name in silent else change(after / before - 1)])
    rows.append(["memory", *map(_verdict, (found.before, found.after))])
    return Columns(rows, right=(1, 2, 3), header=("", *map(clean, names), "change"))


def _verdict(figures: PlanFigures) -> Text:
    words = f"{figures.verdict}, {chance_words(figures.chance_of_fitting)}"
    return Text(words, style="" if figures.fits else "bold red")


def _change_rows(changes: Sequence[ChangedValue], names: tuple[str, str]) -> Columns:
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
        section("Layout", _change_rows(found.layout, names)) if found.layout else None,
        None
        if found.not_compared
        else _line_section(found.time, seconds, names, f"Time, {seconds.unit}", note="of the slowest stage of each"),
        _line_section(found.memory, size, names, f"Memory, {size.unit}", note=note),
    ]
    return [part for part in parts if part is not None]


def _line_section(
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
