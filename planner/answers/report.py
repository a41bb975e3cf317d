"""The report of `planner explain` on one plan: the fixed sections, and one section for each question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from planner.answers.batch import Batch, batch_of
from planner.answers.collectives import Collectives, collectives_of
from planner.answers.layout_remedies import FittingChange, layout_remedies
from planner.answers.peak import Alternative, MemoryBand, StagePeak, alternatives_of, memory_band_of, peaks_of
from planner.answers.plan_inputs import job_of
from planner.answers.scaling import Scaling, scaling_of
from planner.answers.schedules import Schedules, schedules_of
from planner.answers.waterfall import Rate, Waterfall, rates_of, waterfall_of
from planner.answers.what_if import Sensitivity, WhatIf, sensitivity_of
from planner.answers.what_if import what_if as what_if_of
from planner.answers.why_not import WhyNot
from planner.answers.why_not import why_not as why_not_of
from planner.cost.estimate import estimate
from planner.plan import plan_to_dict
from planner.search.reporter import Reporter
from planner.specs.document import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from planner.plan import Plan


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
        """The plan document with a key for each section, as `planner explain --json` prints it.

        The keys are in docs/schemas/explanation.json; equal inputs give equal bytes.
        """
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
    return Explanation(plan=plan, sections=Sections(**found) if parts is None else Sections.model_construct(**found))


def _fixed(plan: Plan, parts: Collection[str] | None, reporter: Reporter, not_run: str) -> dict[str, Any]:
    """The sections that every report has."""
    job, layout = job_of(plan), plan.layout
    priced = cache(lambda: estimate(job, layout))
    is_known = plan.fits is not None  # without it nothing is said of what fits
    fixed: dict[str, Callable[[], Any]] = {
        "waterfall": lambda: waterfall_of(job, layout, priced()),
        "rates": lambda: rates_of(job, layout, priced()),
        "peaks": lambda: peaks_of(job, layout),
        "alternatives": lambda: alternatives_of(job, layout) if is_known else (),
        "not_run": lambda: not_run or None,
        "memory_band": lambda: memory_band_of(job, plan) if is_known else None,
        "fitting_changes": lambda: layout_remedies(job, layout) if plan.fits is False else None,
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

    def told(title: str, answer: Callable[..., Any], asked: str) -> Any:
        reporter.about(title)
        return answer(plan, asked, reporter)

    changes = tuple(asked for asked in what_if if asked)
    found: dict[str, Any] = {
        "why_not": tuple(told(f"why not {asked}", why_not_of, asked) for asked in why_not),
        "what_if": tuple(told(f"what if {asked}", partial(what_if_of, search=search), asked) for asked in changes),
        "sensitivity": sensitivity_of(plan, reporter.about, search=search) if len(changes) < len(what_if) else None,
        **{name: answer(plan) for name, answer in _OTHERS.items() if others.get(name)},
        "scaling": None if scaling is None else scaling_of(plan, scaling, reporter.about),
    }
    return {name: answer for name, answer in found.items() if answer}


_OTHERS: Final[dict[str, Callable[[Plan], Any]]] = {
    "schedules": schedules_of,
    "collectives": collectives_of,
    "batch": batch_of,
}
"""Questions without a value."""
