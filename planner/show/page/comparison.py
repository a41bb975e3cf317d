"""The page that compares clusters: a chart of time against cost, and the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.show.page.charts import choices_chart
from planner.show.page.render import template
from planner.show.side_by_side import (
    MEASURES,
    band_words,
    best_at,
    explanation,
    figures,
    job_words,
    names_of,
    price_notes,
    time_header,
    time_words,
)
from planner.show.words import short_layout
from planner.version import VERSION

if TYPE_CHECKING:
    from planner.search.questions.side_by_side import Choice, SideBySide


def comparison_page(found: SideBySide) -> str:
    """Return the comparison page as HTML text; the page loads nothing."""
    plan = found.planned[0].plan
    assert plan is not None
    return template(
        "comparison.html.jinja",
        model=plan.model.name,
        job=job_words(plan),
        time=time_header(plan),
        measure=MEASURES[found.measure],
        explanation=explanation(found),
        prices=price_notes(found),
        chart=choices_chart(found),
        rows=[_row(found, number, each) for number, each in enumerate(found.choices, start=1)],
        version=VERSION,
    )


def _row(found: SideBySide, number: int, choice: Choice) -> dict[str, Any]:
    plan = choice.plan
    devices = f"{plan.layout.world_size:,}" if plan else ""
    return {
        "number": number,
        "name": names_of(found, choice),
        "best": best_at(found, choice),
        "cells": [devices, time_words(choice), band_words(choice), *figures(choice)],
        "layout": short_layout(plan.layout) if plan else "",
        "why_not": choice.why_not,
    }
