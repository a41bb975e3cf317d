"""Render a page from template, styles and script; its content security policy allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from planner.answers.formulas import ledger_rows
from planner.show.explain import answers_by_question
from planner.show.page.charts import front_chart, memory_rows, scaling_chart, waterfall_rows
from planner.show.page.drawings import timeline_data, topology_data
from planner.show.page.facts import facts_of, headline, inputs_of, sensitivity_rows, stage_rows
from planner.show.screen import Screen, clean, to_text
from planner.show.words import slowest_words
from planner.specs.glossary import entries, entry_for
from planner.version import VERSION

if TYPE_CHECKING:
    from planner.answers.executed import ExecutedStep
    from planner.answers.report import Explanation
    from planner.answers.scaling import ReplicaCount
    from planner.answers.what_if import Sensitivity
    from planner.specs.glossary import Entry

_PAPER: Final = Screen(width=100)
"""The screen for which answers are rendered; the page shows them as a terminal does."""

_LONGEST: Final = 2_000
"""Largest number of characters of one text on the page.

A word of 10,000 characters in every cell keeps Chromium busy for minutes; a list of 512 chunks has 1,500 characters.
"""


def page_text(found: Explanation, step: ExecutedStep, *, replicas: tuple[ReplicaCount, ...], gains: Sensitivity) -> str:
    """Return the HTML page of one plan.

    step: the executed step of the plan.
    replicas: step times of the layout with more replicas; shown only without `scaling` in the explanation.
    gains: the gain from more of each resource: `sensitivity` of the explanation, or prices of the layout.
    """
    plan, sections = found.plan, found.sections
    timeline = timeline_data(step)
    return template(
        "page.html.jinja",
        headline=headline(plan),
        facts=facts_of(plan),
        answers=[(name, to_text(answer, _PAPER)) for name, answer in answers_by_question(found)],
        memory=memory_rows(plan, sections.peaks),
        waterfall=waterfall_rows(sections.waterfall),
        slowest=slowest_words(plan),
        stages=stage_rows(plan, step),
        timeline=timeline,
        front=front_chart(plan, sections.alternatives),
        scaling=scaling_chart(plan, sections.scaling, replicas),
        sensitivity=sensitivity_rows(gains, planned=sections.sensitivity is not None),
        ledger=ledger_rows(plan, sections.waterfall),
        inputs=inputs_of(plan),
        glossary=[
            (title, [(_anchor(each), *each.text.split(":", 1)) for each in found])
            for title, found in groupby(entries(), key=lambda each: each.section)
        ],
        data=_embedded({"timeline": timeline, "topology": topology_data(plan)}),
        version=VERSION,
    )


def template(name: str, **values: Any) -> str:
    """Render a template of this folder with the styles and the script that all pages share."""
    style, script = map(_text, ("page.css", "page.js"))
    return _compiled(name).render(
        **values,
        style=Markup(style),  # noqa: S704 - the package's own files
        script=Markup(script),  # noqa: S704
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


@cache
def _compiled(name: str) -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"whole": _whole, "term": _term}
    return environment.from_string(_text(name))


def _shown(value: Any) -> Any:
    """Remove control and direction characters from a user's text, and shorten it so that browsers render it fast.

    HTML escaping follows after this function.
    """
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    text = _cleaned(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _whole(text: str) -> Markup:
    """Return escaped text without the limit of `_LONGEST`."""
    return escape(_cleaned(text))


def _term(text: str) -> str:
    """Return a word with a link to its glossary entry at the end of the page."""
    entry = entry_for(text)
    if entry is None:
        return text
    return Markup('<a class="term" href="#{}" title="{}">{}</a>').format(_anchor(entry), entry.text, text)


def _anchor(entry: Entry) -> str:
    return "term-" + re.sub(r"[^a-z0-9]+", "-", entry.terms[0].lower()).strip("-")


def _cleaned(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def _hash(text: str) -> str:
    """Return the hash by which the content security policy allows a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _embedded(data: Any) -> Markup:
    """Return data as JSON that cannot end the HTML element around it."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704 - escaped
