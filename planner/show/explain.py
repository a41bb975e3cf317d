"""Output of `planner explain`: the whole ledger, every line with its formula and source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.text import Text

from planner.cost.ledger import total_exposed_seconds
from planner.show.answers import sensitivity_section, what_if_section, why_not_section
from planner.show.batch import batch_section
from planner.show.columns import Columns
from planner.show.figures import bytes_scale, seconds_scale
from planner.show.goodput import goodput_rows
from planner.show.groups import collectives_section
from planner.show.peak import alternatives_section, fitting_section, peak_section
from planner.show.scaling import scaling_section
from planner.show.schedules import schedules_section
from planner.show.screen import clean, indented, section, stack
from planner.show.summary import band_rows, heading, layout_rows, memory_section
from planner.show.waterfall import formula_text, own_parts, part_formulas, rates_section, waterfall_section
from planner.show.words import fold_runs, limit_words, line_label, run_words, slowest_words
from planner.units import format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult

    from planner.cost.ledger import MemoryLine, StageMemory, TimeLine
    from planner.explain.report import Explanation
    from planner.explain.waterfall import Waterfall
    from planner.plan import Plan
    from planner.show.figures import Scale


def explanation(found: Explanation) -> Group:
    """Show the heading, the memory of every stage, the time of the step, and the formulas of memory and time."""
    plan, sections = found.plan, found.sections
    step = f"{format_seconds(plan.step_seconds)}, {format_count(plan.tokens_per_second_per_device)} tokens/s per device"
    rates = f"MFU {plan.mfu:.1%}, HFU {plan.hfu:.1%}"
    convention = Text(f"  {clean(plan.flops_convention)}", style="dim")
    rows: list[tuple[str, RenderableType]] = [
        ("step", step),
        *band_rows(plan),
        ("rates", Text.assemble(rates, convention)),
    ]
    if whole := run_words(plan):
        rows.append(("whole run", whole))
    rows += goodput_rows(plan)
    scale = bytes_scale(stage.total_bytes for stage in plan.memory)
    return stack(
        heading(plan),
        indented(Columns(layout_rows(plan), wrap=(1,))),
        indented(Columns(rows, wrap=(1,))),
        memory_section(plan.memory, note=limit_words(plan), is_known=plan.fits is not None),
        peak_section(plan, sections.peaks, sections.memory_band),
        fitting_section(plan, sections.fitting_changes),
        alternatives_section(plan, sections.alternatives),
        waterfall_section(sections.waterfall, slowest_words(plan)),
        rates_section(sections.rates),
        section(f"Memory of each stage, {scale.unit}", _StageColumns(plan, scale)),
        _time_section(plan),
        section("Formulas of memory", _formulas(_distinct(plan.memory))),
        section("Formulas of the waterfall", part_formulas(own_parts(plan, sections.waterfall))),
        section("Formulas of time", _formulas(_spent(plan), _numbers(sections.waterfall))),
        Text("What a word means: planner glossary WORD", style="dim"),
    )


def answers(found: Explanation) -> Group:
    """Show the answers to the user's questions as sections below the heading of the plan."""
    plan = found.plan
    return stack(
        heading(plan),
        indented(Columns(layout_rows(plan), wrap=(1,))),
        *(section for _, section in answers_by_question(found)),
    )


def answers_by_question(found: Explanation) -> list[tuple[str, Group]]:
    """Return (question in a few words, answer) for each question."""
    plan, sections = found.plan, found.sections
    answered = [
        *((f"Why not {each.asked}", why_not_section(each)) for each in sections.why_not),
        *((f"What if {each.asked}", what_if_section(each)) for each in sections.what_if),
    ]
    if sections.sensitivity:
        answered.append(("10 % more of each resource", sensitivity_section(sections.sensitivity)))
    if sections.schedules:
        answered.append(("Schedules", schedules_section(sections.schedules)))
    if sections.collectives:
        answered.append(("Collectives", collectives_section(sections.collectives)))
    if sections.batch:
        answered.append(("Batch", batch_section(plan, sections.batch)))
    if sections.scaling:
        answered.append(("Scaling", scaling_section(sections.scaling)))
    return answered


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


def _time_section(plan: Plan) -> Group:
    total = float(total_exposed_seconds(plan.time))
    scale = seconds_scale([float(line.busy_seconds) for line in plan.time] + [total])
    rows: list[list[RenderableType]] = [
        [
            line_label(line.name),
            str(line.stage),
            scale(float(line.busy_seconds)),
            scale(float(line.hidden_seconds)),
            scale(float(line.exposed_seconds)),
            f"{float(line.exposed_seconds) / total:.1%}" if line.exposed_seconds else "",
            Text(clean(line.bound) if line.busy_seconds else "", style="dim"),
        ]
        for line in _spent(plan)
    ]
    rows.append([Text("step", style="bold"), "", "", "", Text(scale(total), style="bold"), "100.0%"])
    header = ("", "stage", "busy", "hidden", "exposed", "share", "bound by")
    table = Columns(rows, right=(1, 2, 3, 4, 5), optional=(5, 1), header=header)
    note = "; ".join(filter(None, ("exposed = busy - hidden; the step is their sum", slowest_words(plan))))
    return section(f"Time of a step, {scale.unit}", table, note=note)


def _spent(plan: Plan) -> list[TimeLine]:
    """Return the lines of time that are not zero; no plan communicates along every axis."""
    return [line for line in plan.time if line.busy_seconds > 0]


def _distinct(memory: Sequence[StageMemory]) -> list[MemoryLine]:
    """Return one memory line for each distinct formula, in the order of the ledger, over all stages."""
    lines = [line for stage in memory for line in stage.lines]
    order = [line.name for line in memory[0].lines]
    seen = {(line.name, line.formula, line.source): line for line in lines}
    return sorted(seen.values(), key=lambda line: order.index(line.name))


def _numbers(waterfall: Waterfall) -> dict[str, str]:
    return {part.name: part.numbers for part in waterfall.parts}


def _formulas(lines: Iterable[MemoryLine | TimeLine], numbers: Mapping[str, str] | None = None) -> RenderableType:
    rows = [
        (line_label(line.name), formula_text(line.formula, (numbers or {}).get(line.name, ""), line.source))
        for line in lines
    ]
    return Columns(rows, wrap=(1,))
