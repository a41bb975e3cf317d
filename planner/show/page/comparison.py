"""The page that compares clusters: a chart of time against cost, and the table."""

from __future__ import annotations

from typing import Any

from planner.answers.side_by_side import (
    SideBySide,
    best_at,
    explanation,
    first_plan,
    job_words,
    price_notes,
    rows_of,
)
from planner.show.comparison_rows import MEASURES, Row, all_figures, requirements_missed
from planner.show.page.charts import choices_chart
from planner.show.page.render import template
from planner.show.words import short_layout
from planner.version import VERSION


def comparison_page(found: SideBySide) -> str:
    """Return the comparison page as HTML text; the page loads nothing."""
    plan, rows = first_plan(found), rows_of(found)
    headings, cells = all_figures(rows, plan.training)
    every = enumerate(zip(rows, best_at(found, rows), cells, strict=True), start=1)
    return template(
        "comparison.html.jinja",
        model=plan.model.name,
        job=job_words(plan),
        headings=headings,
        measure=MEASURES[found.measure][0],
        explanation=" ".join([*requirements_missed(rows), explanation(found)]),
        prices=price_notes(found),
        chart=choices_chart(found),
        rows=[_row(number, row, best, [each[name] for name in headings]) for number, (row, best, each) in every],
        version=VERSION,
    )


def _row(number: int, row: Row, best: str, cells: list[str]) -> dict[str, Any]:
    return {
        "number": number,
        "name": row.names[0],
        "best": best,
        "cells": [*row.names[1:], *cells],
        "layout": short_layout(row.layout) if row.layout else "",
        "why_not": row.why_not,
    }
