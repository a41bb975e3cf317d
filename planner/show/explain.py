"""Output of `planner explain`: a short answer with a list of sections, and the sections, opened by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.columns import Columns as SideBySide
from rich.console import Group
from rich.text import Text

from planner.cost.ledger import total_exposed_seconds
from planner.errors import InputError, Mistake
from planner.later import at
from planner.show.columns import Columns, assignments
from planner.show.goodput import checkpoint_words, goodput_rows
from planner.show.rows import ANSWER, ASSUMED, BAND, LAYOUT, PROOF, rows_of
from planner.show.screen import clean, section, stack
from planner.show.summary import heading, runners_up, with_reason
from planner.show.words import limit_words, line_label, run_words, short_layout, slowest_words
from planner.specs.text import did_you_mean, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import RenderableType

    from planner.answers.report import Explanation
    from planner.plan import Plan
    from planner.show.rows import Rows

_FEW: Final = 3
"""Changes that make a layout fit, in the short answer."""


class Section(NamedTuple):
    """A part of the explanation that is opened by name.

    holds: what it has, in a few words.
    show: returns the parts with something to show.
    parts: fields of the report that it needs, so that no other is computed.
    none: what it says if it has nothing to show.
    """

    holds: str
    show: Callable[[Explanation], Iterable[RenderableType | None]]
    parts: tuple[str, ...] = ()
    none: str = ""


def overview(found: Explanation) -> Group:
    """Show the short answer of a plan, the changes that make it fit if it does not, and the list of sections."""
    plan = found.plan
    width = max(map(len, SECTIONS))
    cells = [Text.assemble((f"{name:{width}}  ", "bold"), (each.holds, "dim")) for name, each in SECTIONS.items()]
    listed = SideBySide(cells, padding=(0, 2), column_first=True, equal=True)
    return stack(
        heading(plan),
        rows_of(plan, ANSWER | {"checkpoint": checkpoint_words}),
        at("answers.peak:fitting_section")(plan, found.sections.fitting_changes[:_FEW]) if plan.fits is False else None,
        section("Sections", listed, note="add NAME ... after PLAN, or --section NAME after CLUSTER; --all"),
    )


def explanation(found: Explanation, names: Iterable[str] = ()) -> Group:
    """Show some sections of a plan; without names all of them, below the short answer."""
    chosen = list(names)
    shown: list[RenderableType | None] = [] if chosen else [rows_of(found.plan, ANSWER)]
    for name in chosen or SECTIONS:
        parts = [each for each in SECTIONS[name].show(found) if each is not None]
        if not parts and chosen:
            parts = [section(name.capitalize(), Text(SECTIONS[name].none))]
        shown += parts
    if not chosen:
        shown.append(Text("What a word means: planner glossary WORD", style="dim"))
    return stack(heading(found.plan), *shown)


def section_names(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names of sections in some words, which may join names with commas.

    Raises:
        InputError: a word names no section; all such words are listed.
    """
    names = tuple(name for word in words for name in word.split(",") if name)
    listing = f"sections are {', '.join(SECTIONS)}; MODEL CLUSTER goes with --layout tp=8,pp=4,..."
    hints = {name: did_you_mean(name, SECTIONS, otherwise=listing) for name in names if name not in SECTIONS}
    if hints:
        raise InputError(*(Mistake(message=f"no section {quoted(name)}", hint=hint) for name, hint in hints.items()))
    return names


def parts_of(names: Iterable[str]) -> set[str]:
    """Return the fields of the report that some sections need."""
    return {part for name in names for part in SECTIONS[name].parts}


def _memory(found: Explanation) -> Iterable[RenderableType | None]:
    plan = found.plan
    yield at("show.memory:memory_section")(plan.memory, note=limit_words(plan), is_known=plan.fits is not None)
    yield at("show.memory:stages_section")(plan)
    yield at("answers.peak:transients_section")(plan, found.sections.peaks)


def _time(found: Explanation) -> Iterable[RenderableType | None]:
    yield at("answers.waterfall:waterfall_section")(found.sections.waterfall, slowest_words(found.plan))
    yield _time_section(found.plan)


def _others(found: Explanation) -> Iterable[RenderableType | None]:
    yield runners_up(found.plan, lambda each: with_reason(each, assignments(short_layout(each.layout))))
    yield at("answers.peak:alternatives_section")(found.plan, found.sections.alternatives)


def _run(found: Explanation) -> Iterable[RenderableType | None]:
    plan = found.plan
    rows = [("whole run", run_words(plan) or "length unknown; --set training.tokens=100B tells its days and its cost")]
    if plan.run is not None and plan.run.usd is None:
        rows.append(("price", "none; --set training.price='2.50 USD/h' gives a device's"))
    yield section("Run", Columns([*rows, *goodput_rows(plan), ("checkpoint", checkpoint_words(plan))], wrap=(1,)))


def _rows(title: str, rows: Rows) -> Callable[[Explanation], list[RenderableType]]:
    """Return the function that shows a table of rows as a section."""

    def show(found: Explanation) -> list[RenderableType]:
        shown = rows_of(found.plan, rows)
        return [Group(Text(title, style="bold"), shown)] if shown else []

    return show


def answers(found: Explanation) -> Group:
    """Show the answers to the user's questions as sections below the heading of the plan."""
    plan = found.plan
    return stack(
        heading(plan),
        rows_of(plan, LAYOUT | ASSUMED),
        *(section for _, section in answers_by_question(found)),
    )


def answers_by_question(found: Explanation) -> list[tuple[str, Group]]:
    """Return (question in a few words, answer) for each question."""
    sections = found.sections
    others: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
        *((f"Why not {each.asked}", "answers.why_not:why_not_section", (each,)) for each in sections.why_not),
        *((f"What if {each.asked}", "answers.what_if:what_if_section", (each,)) for each in sections.what_if),
        ("10 % more of each resource", "answers.what_if:sensitivity_section", (sections.sensitivity,)),
        ("Schedules", "answers.schedules:schedules_section", (sections.schedules,)),
        ("Collectives", "answers.collectives:collectives_section", (sections.collectives,)),
        ("Batch", "answers.batch:batch_section", (found.plan, sections.batch)),
        ("Scaling", "answers.scaling:scaling_section", (sections.scaling,)),
    )
    return [(title, at(view)(*parts)) for title, view, parts in others if parts[-1]]


def _time_section(plan: Plan) -> Group:
    total = float(total_exposed_seconds(plan.time))
    scale = at("show.figures:seconds_scale")([float(line.busy_seconds) for line in plan.time] + [total])
    rows: list[list[RenderableType]] = [
        [
            line_label(line.name),
            str(line.stage),
            scale(float(line.busy_seconds)),
            scale(float(line.hidden_seconds)),
            scale(float(line.exposed_seconds)),
            f"{float(line.exposed_seconds) / total:.1%}" if line.exposed_seconds else "",
            Text(clean(line.bound), style="dim"),
        ]
        for line in plan.time
        if line.busy_seconds > 0  # no plan communicates along every axis
    ]
    rows.append([Text("step", style="bold"), "", "", "", Text(scale(total), style="bold"), "100.0%"])
    header = ("", "stage", "busy", "hidden", "exposed", "share", "bound by")
    table = Columns(rows, right=(1, 2, 3, 4, 5), optional=(5, 1), header=header)
    note = "; ".join(filter(None, ("exposed = busy - hidden; the step is their sum", slowest_words(plan))))
    return section(f"Time of a step, {scale.unit}", table, note=note)


SECTIONS: Final = {
    "layout": Section("degrees, schedule, layers", _rows("Layout", LAYOUT)),
    "memory": Section("each line of each stage", _memory, parts=("peaks",)),
    "peak": Section(
        "the fullest moment",
        lambda found: [at("answers.peak:peak_section")(found.plan, found.sections.peaks, found.sections.memory_band)],
        parts=("peaks", "memory_band"),
    ),
    "fit": Section(
        "what would make it fit",
        lambda found: [at("answers.peak:fitting_section")(found.plan, found.sections.fitting_changes)],
        parts=("fitting_changes",),
        none="It fits.",
    ),
    "time": Section("from peak FLOP/s to the step", _time, parts=("waterfall",)),
    "rates": Section(
        "MFU, by what it counts",
        lambda found: [at("answers.waterfall:rates_section")(found.sections.rates)],
        parts=("rates",),
    ),
    "others": Section("runners-up, single changes", _others, parts=("alternatives",), none="Nothing else was priced."),
    "proof": Section("what is proved, and how", _rows("Proof", PROOF), none="A given layout has no proof."),
    "band": Section("what the band rests on", _rows("Band", BAND)),
    "batch": Section(
        "how the batch was chosen",
        lambda found: [at("answers.batch:chosen_batch_section")(found.plan)],
        none="The batch was given; --batch shows what others would change.",
    ),
    "run": Section("whole run, checkpoint", _run),
    "assumed": Section(
        "values not given",
        _rows("Assumed", ASSUMED),
        none="No key of the layout was left open; --json has what the documents leave to defaults.",
    ),
    "formulas": Section(
        "formulas and sources",
        lambda found: at("answers.formulas:formula_sections")(found.plan, found.sections.waterfall),
        parts=("waterfall",),
    ),
}
"""The sections of an explanation, in their order."""
