"""Sections on memory: each stage against its limit and line by line, the peak, and layouts that differ in one key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.measure import Measurement
from rich.text import Text

from planner.cost.ledger import LineName
from planner.show.columns import Columns, Flow
from planner.show.figures import MemoryBar, bytes_scale, fill_of
from planner.show.screen import section
from planner.show.words import fold_runs, line_label, stage_range
from planner.sums import sum_of
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult

    from planner.cost.ledger import StageMemory
    from planner.plan import Plan
    from planner.show.figures import Scale

_MANY: Final = 10
"""Largest number of rows; adjacent stages of a longer pipeline share one, which shows their fullest stage."""


def memory_section(memory: Sequence[StageMemory], *, note: str, is_known: bool = True) -> Group:
    """Show a bar of each stage's memory against its limit; stages that look alike share a row.

    is_known: whether all that the stages need has a price; else no chance is shown.
    """
    full = max(max(stage.total_bytes, stage.limit_bytes) for stage in memory)
    scale = bytes_scale(stage.total_bytes for stage in memory)
    folded = fold_runs(
        memory, lambda stage: (stage.limit_bytes, [scale(float(line.num_bytes)) for line in stage.lines]), _MANY
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
        for group in folded
        for fullest in (max(group, key=lambda stage: stage.total_bytes / stage.limit_bytes),)
    ]
    header = ("", "", scale.unit, "of limit", "fits")
    table = Columns(rows, right=(2, 3, 4), wrap=(1,), optional=(1,), header=header)
    return section("Memory of a device", table, _Legend(memory), note=note)


def _share_of_limit(stage: StageMemory) -> Text:
    over = stage.total_bytes > stage.limit_bytes
    return Text(f"{stage.total_bytes / stage.limit_bytes:.0%}", style="bold red" if over else "")


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
