"""Sections on memory: each stage against its limit and line by line, the peak, and layouts that differ in one key."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from rich.measure import Measurement
from rich.text import Text

from planner.cost.ledger import LineName
from planner.show.columns import Columns, Flow, assignments
from planner.show.figures import MemoryBar, bytes_scale, fill_of
from planner.show.screen import clean, section
from planner.show.words import change, fold_runs, line_label, percent, short_layout, stage_range
from planner.sums import sum_of
from planner.units import format_bytes, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult

    from planner.cost.ledger import StageMemory
    from planner.explain.memory_band import MemoryBand
    from planner.explain.peak import Alternative, FittingChange, StagePeak
    from planner.plan import Plan
    from planner.show.figures import Scale

_MANY: Final = 10  # largest number of rows; a longer table is folded in the middle


def memory_section(memory: Sequence[StageMemory], *, note: str, is_known: bool = True) -> Group:
    """Show a bar of each stage's memory against its limit; stages that look alike share a row.

    is_known: whether all that the stages need has a price; else no chance is shown.
    """
    full = max(max(stage.total_bytes, stage.limit_bytes) for stage in memory)
    scale = bytes_scale(stage.total_bytes for stage in memory)
    folded = fold_runs(
        memory, lambda stage: (stage.limit_bytes, [scale(float(line.num_bytes)) for line in stage.lines])
    )
    rows = [
        (
            stage_range([stage.stage for stage in group]),
            MemoryBar(memory=fullest, full_bytes=full),
            scale(fullest.total_bytes),
            _share_of_limit(fullest),
            Text(
                chance_words(fullest.chance_of_fitting if is_known else None),
                style="" if fullest.fits and is_known else "bold red",
            ),
        )
        for group in _fold_middle(folded)
        for fullest in (max(group, key=lambda stage: stage.total_bytes / stage.limit_bytes),)
    ]
    header = ("", "", scale.unit, "of limit", "fits")
    table = Columns(rows, right=(2, 3, 4), wrap=(1,), optional=(1,), header=header)
    return section("Memory of a device", table, _Legend(memory), note=note)


def _share_of_limit(stage: StageMemory) -> Text:
    over = stage.total_bytes > stage.limit_bytes
    return Text(f"{stage.total_bytes / stage.limit_bytes:.0%}", style="bold red" if over else "")


def _fold_middle(groups: list[list[StageMemory]]) -> list[list[StageMemory]]:
    """Return at most ten rows; adjacent stages of a long pipeline share a row, which shows their fullest stage."""
    size = -(-len(groups) // _MANY)
    return [list(chain(*groups[first : first + size])) for first in range(0, len(groups), size)]


class _Legend:
    """The legend of the bars' fills, in Unicode or ASCII as the screen allows."""

    def __init__(self, memory: Sequence[StageMemory]) -> None:
        self._names = [line.name for line in memory[0].lines if any(_bytes_of(stage, line.name) for stage in memory)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        items = []
        for name in self._names:
            fill = fill_of(name)
            mark = fill.ascii if options.ascii_only else fill.mark
            items.append(Text.assemble((mark, fill.color), (f" {line_label(name)}", "dim")))
        yield Flow(items)


def _bytes_of(stage: StageMemory, name: str) -> float:
    return sum_of(float(line.num_bytes) for line in stage.lines if line.name == name)


def stages_section(plan: Plan) -> Group:
    """Show every memory line of every stage."""
    scale = bytes_scale(stage.total_bytes for stage in plan.memory)
    weightless = not any(_bytes_of(stage, LineName.PARAMS) for stage in plan.memory)
    note = "the only weights kept are the optimizer's, gathered layer by layer in transients" * weightless
    return section(f"Memory of each stage, {scale.unit}", _StageColumns(plan, scale), note=note)


class _StageColumns:
    """A table with a row for each memory line and a column for each stage, split into blocks that fit the width."""

    def __init__(self, plan: Plan, scale: Scale) -> None:
        self._plan = plan
        self._scale = scale
        self._groups = fold_runs(
            plan.memory, lambda stage: (stage.limit_bytes, [scale(float(line.num_bytes)) for line in stage.lines])
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(options.max_width, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [line_label(line.name) for line in self._plan.memory[0].lines]
        names_width = max(map(len, [*names, "layers of the tower"] if self._plan.model.vision else names))
        width = 2 + max(max(map(len, self._widest(group))) for group in self._groups)
        fit = max(1, (options.max_width - names_width) // width)
        for first in range(0, len(self._groups), fit):
            if first:
                yield Text("")
            yield self._block(names, self._groups[first : first + fit])

    def _widest(self, group: list[StageMemory]) -> tuple[str, ...]:
        """Return candidates for the longest text in the column of a group of stages."""
        stage = group[0]
        return _stages(group), self._scale(stage.limit_bytes), self._scale(stage.total_bytes), self._free(stage).plain

    def _block(self, names: list[str], groups: list[list[StageMemory]]) -> RenderableType:
        stages = [group[0] for group in groups]
        layers = [str(self._plan.layout.layers_of_stage(stage.stage)) for stage in stages]
        rows: list[list[RenderableType]] = [["layers", *layers]]
        if tower := self._plan.model.vision:
            of_first = f"+{tower.encoder.num_layers}"
            rows.append(["layers of the tower", *("" if stage.stage else of_first for stage in stages)])
        for index, name in enumerate(names):
            rows.append([name, *(self._scale(float(stage.lines[index].num_bytes)) for stage in stages)])
        rows.append([Text("total", style="bold"), *(Text(self._scale(s.total_bytes), style="bold") for s in stages)])
        rows.append([Text("free", style="dim"), *(self._free(stage) for stage in stages)])
        return Columns(rows, right=range(1, len(stages) + 1), header=["stage", *map(_stages, groups)])

    def _free(self, stage: StageMemory) -> Text:
        free = stage.limit_bytes - stage.total_bytes
        return Text(self._scale(free), style="bold red" if free < 0 else "dim")


def _stages(group: list[StageMemory]) -> str:
    first, last = group[0].stage, group[-1].stage
    return str(first) if first == last else f"{first}..{last}"


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


def transients_section(plan: Plan, peaks: Sequence[StagePeak]) -> Group | None:
    """Show the parts of the fullest stage's transients; None if it has none."""
    peak = next(each for each in peaks if each.stage == plan.worst_stage.stage)
    if not peak.transients:
        return None
    scale = bytes_scale(part.num_bytes for part in peak.transients)
    rows = [(clean(part.name), scale(part.num_bytes)) for part in peak.transients]
    return section(f"Transients of stage {peak.stage}, {scale.unit}", Columns(rows, right=(1,)))


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
            assignments(short_layout(each.layout)),
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
