"""The result of planning an alternative: a plan and its difference, the missing memory, or the broken rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich.console import Group
from rich.text import Text

from planner.answers.difference import Difference, difference_body, difference_of
from planner.cost.ledger import Verdict, verdict_of, worst_stage
from planner.errors import InputError
from planner.plan import Plan
from planner.plan_parts import CONFIDENCE, WITHIN, WrittenLayout
from planner.show.columns import Columns, assignments
from planner.show.screen import clean, indented
from planner.show.words import line_label, short_layout, stage_range
from planner.specs.document import Document
from planner.units import format_bytes
from planner.verdict import chance_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from planner.cost.ledger import StageMemory
    from planner.layout import Layout
    from planner.search.footprint import NothingFits
    from planner.search.reporter import Reporter
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


_TOP = 3
"""The default number of runners-up of `planner plan`."""


class Shortfall(Document):
    """The layout nearest to fitting: its fullest stage, and the bytes by which this stage exceeds its limit."""

    layout: WrittenLayout
    stage: int
    needed_bytes: float
    limit_bytes: float
    missing_bytes: float = Field(
        description="bytes above the limit; above the host's limit if the host's memory is too small"
    )
    missing_on_host: bool = False
    verdict: Verdict = "does not fit"
    chance_of_fitting: float = 0.0
    largest_line: str
    largest_line_bytes: float


class Outcome(Document):
    """The result of an alternative; exactly one of the three fields is set."""

    rules: tuple[str, ...] = Field(description="why no layout is legal")
    shortfall: Shortfall | None = Field(description="why no legal layout fits")
    difference: Difference | None = Field(
        description="difference between the explained plan and the plan that was found"
    )


def plan_again(before: Plan, job: Job, constraints: Constraints, **options: Any) -> Plan | NothingFits:
    """Plan the job by the plan's own objective and confidence, as `planner plan` would.

    options: of `search`.

    Raises:
        InputError: as `search`, or a deadline without a token budget.
    """
    from planner.answers.deadline import search_in_time  # a question that only prices loads no search

    name, confidence = before.options.objective, before.options.confidence
    return search_in_time(
        job, constraints, name, confidence=CONFIDENCE if confidence is None else confidence, **options
    )


def outcome_of_search(before: Plan, job: Job, constraints: Constraints, reporter: Reporter | None = None) -> Outcome:
    """Plan the job under the constraints (`plan_again`), and compare the result with the plan."""
    within = before.options.within if before.certificate else WITHIN
    options = {"top": _TOP, "within": within, "reporter": reporter}
    return outcome_of(before, tried(lambda: plan_again(before, job, constraints, **options)))


def tried(make: Callable[[], Plan | NothingFits]) -> Plan | NothingFits | InputError:
    """What `make` returns, or the error that it raises if no layout is legal."""
    try:
        return make()
    except InputError as error:
        return error


def outcome_of(before: Plan, found: Plan | NothingFits | InputError) -> Outcome:
    """Compare an alternative with the plan; or say what it lacks, or which rules it breaks."""
    if isinstance(found, InputError):
        return Outcome(rules=rules_of(found), shortfall=None, difference=None)
    if isinstance(found, Plan) and found.verdict != "does not fit":
        return Outcome(rules=(), shortfall=None, difference=difference_of(before, found))
    return Outcome(rules=(), shortfall=shortfall_of(found.layout, found.memory), difference=None)


def rules_of(error: InputError) -> tuple[str, ...]:
    """The broken rules of an error."""
    return tuple(each.rule or "; ".join(filter(None, (each.message, each.hint))) for each in error.mistakes)


def shortfall_of(layout: Layout, memory: tuple[StageMemory, ...]) -> Shortfall:
    """The need of a layout's fullest stage, the bytes above the limit, and the chance that the layout still fits."""
    fullest = worst_stage(memory)
    largest = max(fullest.lines, key=lambda line: float(line.num_bytes))
    return Shortfall.of(
        fullest,
        layout=layout,
        needed_bytes=fullest.total_bytes,
        missing_on_host=not fullest.host_fits,
        verdict=verdict_of(memory),
        largest_line=largest.name.value,
        largest_line_bytes=float(largest.num_bytes),
    )


def outcome_body(outcome: Outcome, *, names: tuple[str, str]) -> list[RenderableType]:
    """Show the rules that forbid the alternative, or the memory that it lacks, or its difference from the plan."""
    if outcome.rules:
        heading = Text("No legal layout:", style="bold red")
        return [indented(Group(heading, *(indented(Text(clean(rule))) for rule in outcome.rules)))]
    if outcome.shortfall:
        return [indented(_shortfall(outcome.shortfall))]
    assert outcome.difference is not None, "an outcome is one of three"
    found = outcome.difference
    if found.before.layout == found.after.layout and found.before.step_seconds == found.after.step_seconds:
        return [indented(Text("The plan is this already."))]
    return difference_body(found, names=names)


def _shortfall(found: Shortfall) -> Group:
    rows: list[tuple[str, RenderableType]] = [
        ("nearest", assignments(short_layout(found.layout))),
        ("needs", f"{format_bytes(found.needed_bytes)} on {stage_range([found.stage])}"),
        ("chance", chance_words(found.chance_of_fitting)),
        ("limit", format_bytes(found.limit_bytes)),
        ("largest line", f"{line_label(found.largest_line)}, {format_bytes(found.largest_line_bytes)}"),
    ]
    where = " in the host's memory" if found.missing_on_host else ""
    words = f"{found.verdict.capitalize()}: {format_bytes(found.missing_bytes)} too much{where}"
    heading = Text(words, style="bold red")
    return Group(heading, indented(Columns(rows, wrap=(1,))))
