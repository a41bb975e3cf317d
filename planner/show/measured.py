"""Output of `planner launch` at the end of a run: predicted against measured figures, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from planner.show.columns import Columns
from planner.show.screen import Command, clean, section, stack
from planner.show.words import line_label
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Group, RenderableType

    from planner.evidence.compare.measured import Deviation
    from planner.specs.cluster import ClusterSpec

_OF_LINK: Final = ("bandwidth", "latency", "startup", "efficiency")
_HEADER = ("planned", "measured", "ratio", "")


def comparison(deviations: Sequence[Deviation], commands: Sequence[str] = ()) -> Group:
    """Show each line as planned and as measured, or the reason why it was not measured.

    Lines that are zero in both columns are omitted.
    commands: commands to suggest next.
    """
    shown = [each for each in deviations if each.planned or each.measured]
    notes = list(dict.fromkeys(each.note for each in shown if each.note))
    times = [(line_label(clean(each.name)), *_figures(each, notes)) for each in shown if each.stage is None]
    memory = [
        (line_label(clean(each.name)), str(each.stage), *_figures(each, notes))
        for each in shown
        if each.stage is not None
    ]
    time_table = Columns(times, right=(1, 2, 3), header=("", *_HEADER))
    memory_table = Columns(memory, right=(1, 2, 3, 4), header=("", "stage", *_HEADER))
    lines = [Command(text=each) for each in commands]
    return stack(
        section("Time, predicted against measured", time_table, note="ratio = measured / planned"),
        section("Memory of a device, predicted against measured", memory_table) if memory else None,
        section("Notes", Columns(((_mark(i), clean(note)) for i, note in enumerate(notes)), wrap=(1,)))
        if notes
        else None,
        section("Next, to plan with what this run taught", *lines) if lines else None,
    )


def _figures(deviation: Deviation, notes: Sequence[str]) -> tuple[RenderableType, ...]:
    ratio = "" if deviation.relative_error is None else f"{1 + deviation.relative_error:.2f}"
    mark = Text(_mark(notes.index(deviation.note)) if deviation.note else "", style="dim")
    return _figure(deviation.planned, deviation.unit), _figure(deviation.measured, deviation.unit), ratio, mark


def _mark(index: int) -> str:
    return f"[{index + 1}]"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_bytes(value) if unit == "bytes" else format_seconds(value)


def measured_document_view(found: ClusterSpec, made: ClusterSpec, curves: Mapping[str, Any]) -> Group:
    """Show device and link figures of the detected document, each with the measured figure."""
    before, after = (dict(_numbers(each)) for each in (found, made))
    rows = [(key, _number(before[key]), _number(after[key])) for key in after if before[key] != after[key]]
    table = Columns(rows, right=(1, 2), header=("", "before", "measured"))
    notes = []
    if curves.get("load_average", 0.0) > curves["ranks_per_host"] + 0.5:
        notes.append(f"the machine was not idle: {curves['load_average']:.1f} programs ran; measure again when it is")
    if not curves.get("complete", True):
        notes.append("the time was up; what is left out keeps its default")
    return stack(section("Measured", table), *(Text(note, style="bold red") for note in notes))


def _numbers(cluster: ClusterSpec) -> Iterator[tuple[str, float]]:
    device = cluster.device
    yield from ((f"device.peak.{name}", peak) for name, peak in device.peak.items())
    yield "device.memory_bandwidth", device.memory_bandwidth
    yield from ((f"device.efficiency.{key}", value) for key, value in dict(device.efficiency).items())
    for link in cluster.links:
        yield from ((f"{link.name}.{key}", getattr(link, key)) for key in _OF_LINK)


def _number(value: float) -> str:
    return f"{value:.3g}"
