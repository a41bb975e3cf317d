"""The report of `planner explain` on one plan: the fixed sections, and one section for each question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from planner.answers.plan_inputs import job_of
from planner.cost.estimate import estimate
from planner.later import at
from planner.plan import plan_to_dict
from planner.search.reporter import Reporter
from planner.specs.document import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from planner.answers.batch import Batch
    from planner.answers.collectives import Collectives
    from planner.answers.layout_remedies import FittingChange
    from planner.answers.peak import Alternative, MemoryBand, StagePeak
    from planner.answers.scaling import Scaling
    from planner.answers.schedules import Schedules
    from planner.answers.waterfall import Rate, Waterfall
    from planner.answers.what_if import Sensitivity, WhatIf
    from planner.answers.why_not import WhyNot
    from planner.plan import Plan

_TYPES: Final = (
    *("batch:Batch", "collectives:Collectives", "layout_remedies:FittingChange", "peak:Alternative", "peak:MemoryBand"),
    *("peak:StagePeak", "scaling:Scaling", "schedules:Schedules", "waterfall:Rate", "waterfall:Waterfall"),
    *("what_if:Sensitivity", "what_if:WhatIf", "why_not:WhyNot"),
)
"""Types of the sections, each in the module of its question, which is imported only if the question is asked."""


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


def whole_sections() -> type[Sections]:
    """The class with the types of all answers, which only a document of JSON and its schema need."""
    Sections.model_rebuild(_types_namespace={each.partition(":")[2]: at(f"answers.{each}") for each in _TYPES})
    return Sections


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan and the sections of its report."""

    plan: Plan
    sections: Sections

    def to_json(self) -> str:
        """The plan document with a key for each section, as `planner explain --json` prints it.

        The keys are in docs/schemas/explanation.json; equal inputs give equal bytes.
        """
        whole_sections()
        document = plan_to_dict(self.plan) | self.sections.model_dump(mode="json", exclude_unset=True)
        return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=True) + "\n"


def explain(
    plan: Plan,
    *,
    parts: Collection[str] | None = None,
    reporter: Reporter | None = None,
    not_run: str = "",
    **questions: Any,
) -> Explanation:
    """Analyse a plan and answer the questions; without questions no search runs.

    parts: names of the fixed sections to compute, the others have no value; None for all.
    reporter: receives the progress of each search.
    not_run: why no emitted program runs the layout.
    questions: as of `planner.api.explain_layout`; an empty `what_if` asks for the sensitivity table.

    Raises:
        InputError: a question that cannot be read, or a plan whose options are not valid.
        EnvironmentProblem: a file that a question names cannot be read.
    """
    reporter = reporter or Reporter()
    found = _fixed(plan, parts, reporter, not_run) | _answers(plan, reporter, **questions)
    return Explanation(
        plan=plan, sections=whole_sections()(**found) if parts is None else Sections.model_construct(**found)
    )


def _fixed(plan: Plan, parts: Collection[str] | None, reporter: Reporter, not_run: str) -> dict[str, Any]:
    """The sections that every report has."""
    job, layout = job_of(plan), plan.layout
    priced = cache(lambda: estimate(job, layout))
    is_known = plan.fits is not None  # without it nothing is said of what fits
    fixed: dict[str, Callable[[], Any]] = {
        "waterfall": lambda: at("answers.waterfall:waterfall_of")(job, layout, priced()),
        "rates": lambda: at("answers.waterfall:rates_of")(job, layout, priced()),
        "peaks": lambda: at("answers.peak:peaks_of")(job, layout),
        "alternatives": lambda: at("answers.peak:alternatives_of")(job, layout) if is_known else (),
        "not_run": lambda: not_run or None,
        "memory_band": lambda: at("answers.peak:memory_band_of")(job, plan) if is_known else None,
        "fitting_changes": lambda: (
            at("answers.layout_remedies:layout_remedies")(job, layout) if plan.fits is False else None
        ),
    }
    if plan.fits is False:
        reporter.about("what would make it fit")
    return {name: part for name in fixed if (parts is None or name in parts) and (part := fixed[name]()) is not None}


def _answers(
    plan: Plan,
    reporter: Reporter,
    *,
    why_not: Sequence[str] = (),
    what_if: Sequence[str] = (),
    scaling: str | None = None,
    search: bool = True,
    **others: bool,
) -> dict[str, Any]:
    """The sections that answer the questions; the search of each is announced.

    others: whether each of `_OTHERS` is asked.
    """

    def told(title: str, answer: str, asked: str, **how: bool) -> Any:
        reporter.about(title)
        return at(answer)(plan, asked, reporter, **how)

    changes = tuple(asked for asked in what_if if asked)
    found: dict[str, Any] = {
        "why_not": tuple(told(f"why not {asked}", "answers.why_not:why_not", asked) for asked in why_not),
        "what_if": tuple(
            told(f"what if {asked}", "answers.what_if:what_if", asked, search=search) for asked in changes
        ),
        **{name: at(answer)(plan) for name, answer in _OTHERS.items() if others.get(name)},
    }
    if len(changes) < len(what_if):
        found["sensitivity"] = at("answers.what_if:sensitivity_of")(plan, reporter.about, search=search)
    if scaling is not None:
        found["scaling"] = at("answers.scaling:scaling_of")(plan, scaling, reporter.about)
    return {name: answer for name, answer in found.items() if answer}


_OTHERS: Final = {
    "schedules": "answers.schedules:schedules_of",
    "collectives": "answers.collectives:collectives_of",
    "batch": "answers.batch:batch_of",
}
"""Questions without a value."""
