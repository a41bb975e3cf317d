"""The report of `planner explain` on one plan: the fixed sections, and one section for each question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.answers.batch import Batch, batch_of
from planner.answers.collectives import Collectives, collectives_of
from planner.answers.peak import (
    Alternative,
    FittingChange,
    MemoryBand,
    StagePeak,
    alternatives_of,
    changes_that_fit,
    memory_band_of,
    peaks_of,
)
from planner.answers.plan_inputs import job_of
from planner.answers.scaling import Scaling, scaling_of
from planner.answers.schedules import Schedules, schedules_of
from planner.answers.waterfall import Rate, Waterfall, rates_of, waterfall_of
from planner.answers.what_if import Sensitivity, WhatIf, sensitivity_of, what_if
from planner.answers.why_not import WhyNot, why_not
from planner.cost.estimate import estimate
from planner.plan import plan_to_dict
from planner.specs.banned import not_run
from planner.specs.document import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from planner.plan import Plan
    from planner.search.reporter import Reporter


class Sections(Document):
    """The sections of a report; each field is a key that `planner explain --json` adds to the keys of the plan.

    not_run: why no emitted program runs the layout; absent without such a reason.
    """

    waterfall: Waterfall
    rates: tuple[Rate, ...]
    peaks: tuple[StagePeak, ...]
    alternatives: tuple[Alternative, ...]
    not_run: str = ""
    fitting_changes: tuple[FittingChange, ...] = ()
    memory_band: MemoryBand | None = None
    why_not: tuple[WhyNot, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    sensitivity: Sensitivity | None = None
    schedules: Schedules | None = None
    collectives: Collectives | None = None
    batch: Batch | None = None
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan and the sections of its report."""

    plan: Plan
    sections: Sections

    def to_json(self) -> str:
        """The plan and the answers as JSON text, as `planner explain --json` prints them."""
        return explanation_to_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Questions beyond the fixed sections; an empty `what_if` asks for the sensitivity table.

    search: whether the answers to `what_if` plan again, or only price the plan's own layout.
    """

    why_not: tuple[str, ...] = ()
    what_if: tuple[str, ...] = ()
    schedules: bool = False
    collectives: bool = False
    batch: bool = False
    scaling: str | None = None
    search: bool = True


def explain(
    plan: Plan,
    questions: Questions | None = None,
    *,
    parts: Collection[str] | None = None,
    reporter: Reporter | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Explanation:
    """Analyse a plan and answer the questions; without questions no search runs.

    parts: names of the fixed sections to compute, the others have no value; None for all.
    reporter: receives the progress of each search.
    tell: called with the subject of each search before it starts.

    Raises:
        InputError: a question that cannot be read, or a plan whose options are not valid.
        EnvironmentProblem: a file that a question names cannot be read.
    """
    job = job_of(plan)
    priced = estimate(job, plan.layout)
    is_known = plan.fits is not None  # without it nothing is said of what fits
    fixed: dict[str, Callable[[], Any]] = {
        "waterfall": lambda: waterfall_of(job, plan.layout, priced),
        "rates": lambda: rates_of(job, plan.layout, priced),
        "peaks": lambda: peaks_of(job, plan.layout),
        "alternatives": lambda: alternatives_of(job, plan.layout) if is_known else (),
        "not_run": lambda: not_run(plan.engine, plan.layout) or None,
        "memory_band": lambda: memory_band_of(job, plan) if is_known else None,
        "fitting_changes": lambda: changes_that_fit(job, plan.layout) if plan.fits is False else None,
    }
    if plan.fits is False:
        tell("what would make it fit")
    wanted = fixed if parts is None else [name for name in fixed if name in parts]
    found = {name: part for name in wanted if (part := fixed[name]()) is not None}
    found |= _answers(plan, questions or Questions(), reporter, tell)
    return Explanation(plan=plan, sections=Sections(**found) if parts is None else Sections.model_construct(**found))


def _answers(
    plan: Plan, questions: Questions, reporter: Reporter | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The sections that answer the questions."""

    def told(title: str, answer: Callable[[Plan, str, Reporter | None], Any], asked: str) -> Any:
        tell(title)
        return answer(plan, asked, reporter)

    found: dict[str, Any] = {}
    if questions.why_not:
        found["why_not"] = tuple(told(f"why not {asked}", why_not, asked) for asked in questions.why_not)
    changes = tuple(asked for asked in questions.what_if if asked)
    ask = partial(what_if, search=questions.search)
    if changes:
        found["what_if"] = tuple(told(f"what if {asked}", ask, asked) for asked in changes)
    if len(changes) < len(questions.what_if):
        found["sensitivity"] = sensitivity_of(plan, tell, search=questions.search)
    if questions.schedules:
        found["schedules"] = schedules_of(plan)
    if questions.collectives:
        found["collectives"] = collectives_of(plan)
    if questions.batch:
        found["batch"] = batch_of(plan)
    if questions.scaling is not None:
        found["scaling"] = scaling_of(plan, questions.scaling, tell)
    return found


def explanation_to_json(found: Explanation) -> str:
    """The plan document with a key for each section (docs/schemas/explanation.json); equal inputs give equal bytes."""
    document = plan_to_dict(found.plan) | found.sections.model_dump(mode="json", exclude_unset=True)
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=True) + "\n"
