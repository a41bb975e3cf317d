"""Answers to `--why-not` and `--what-if`, and the gain from 10 % more of each resource."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from planner.search.near_ties import slower_by
from planner.show.columns import Columns, assignments
from planner.show.difference import outcome_body
from planner.show.screen import clean, indented, section, stack
from planner.show.words import saved_words, short_layout
from planner.units import format_bytes, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from planner.explain.what_if import Gain, Sensitivity, WhatIf
    from planner.explain.why_not import WhyNot


def why_not_section(found: WhyNot) -> Group:
    """Show the alternative layout, and the result of planning with it."""
    asked = clean(found.asked)
    title = Text(f"Why not {asked}", style="bold")
    pins = f"solved with {', '.join(found.pins)}" if found.pins else "priced as it is"
    title.append(f"  {clean(pins)}", style="not bold dim")
    difference = found.outcome.difference
    verdict: RenderableType | None = None
    if difference and difference.before.layout != difference.after.layout:
        share = difference.after.step_seconds / difference.before.step_seconds - 1
        step = format_seconds(difference.after.step_seconds)
        fits = "" if difference.after.fits else f" It {difference.after.verdict}."
        best = f"If {', '.join(found.also)} change{'s' * (len(found.also) == 1)} as well, it" if found.also else "It"
        verdict = indented(Text(clean(f"{best} would be {slower_by(share)}: {step} a step.{fits}")))
    return stack(title, _alone(found), verdict, *outcome_body(found.outcome, names=("plan", _short(asked))))


def _alone(found: WhyNot) -> RenderableType | None:
    """State the step time, the missing memory, or the broken rules of the plan's layout with only the asked change.

    The result is None if the forced plan differs from the plan only in this change, or if no layout is legal.
    """
    if found.alone_rules:
        words = f"Changed alone it is not allowed: {'; '.join(found.alone_rules)}."
        return None if found.outcome.rules else indented(Text(clean(words), style="bold red"))
    if found.alone is None:
        difference = found.outcome.difference
        if found.alone_step_seconds is None or difference is None or not found.also:
            return None
        share = slower_by(found.alone_step_seconds / difference.before.step_seconds - 1)
        return indented(
            Text(f"Changed alone it fits and is {share}: {format_seconds(found.alone_step_seconds)} a step.")
        )
    alone, host = found.alone, " in the host's memory" if found.alone.missing_on_host else ""
    missing = f"{format_bytes(alone.missing_bytes)} too much{host} on stage {alone.stage}"
    words = f"Changed alone it {alone.verdict}: {missing}, chance of fitting {chance_words(alone.chance_of_fitting)}."
    return indented(Text(words, style="bold red"))


def what_if_section(found: WhatIf) -> Group:
    """Show the plan's own layout under the change, and the best plan under the change."""
    asked = clean(found.asked)
    same = found.same_layout
    if same is None:
        words = "The plan's layout is not legal then."
    else:
        fits = "" if same.fits else f", and {same.verdict}"
        share = "not compared" if found.not_compared else slower_by(same.step_seconds / found.step_seconds - 1)
        steps = f"{format_seconds(found.step_seconds)} now, {format_seconds(same.step_seconds)} then"
        words = f"The plan's own layout: {steps}, {share}{fits}."
    title = Text(f"What if {asked}", style="bold")
    return stack(
        title, indented(Text(words)), _planned_again(found), *outcome_body(found.outcome, names=("now", "then"))
    )


def _planned_again(found: WhatIf) -> RenderableType | None:
    """Note that the following table is for another layout than the plan's; None if the layout is the same."""
    difference = found.outcome.difference
    if difference is None or difference.before.layout == difference.after.layout:
        return None
    then = format_seconds(difference.after.step_seconds)
    if found.best_step_seconds is None:
        words = f"Planned again: {then} with another layout, which stands below."
    else:
        now = format_seconds(found.best_step_seconds)
        words = f"Planned again: {now} now, {then} then, with another layout than yours; it stands below."
    return indented(Text(words))


def _short(text: str) -> str:
    return text if len(text) <= 16 else "instead"


def sensitivity_section(found: Sensitivity) -> Group:
    """Show the gain from 10 % more of each resource, largest gain first."""
    rows = [
        (
            clean(_resource(each)),
            clean(each.before),
            clean(each.after),
            "" if each.same_layout_gain is None else _gain(each.same_layout_gain),
            Text(_gain(each.gain), style="bold"),
            assignments(short_layout(each.layout)) if each.other_layout else Text("the same", style="dim"),
        )
        for each in found.gains
    ]
    header = ("10 % better", "from", "to", "as it is", "replanned", "best layout then")
    return section(
        "Where the next dollar should go",
        Columns(rows, right=(3, 4), wrap=(5,), optional=(2, 1, 5), header=header),
        note=saved_words(found.objective, found.step_seconds),
    )


def _resource(found: Gain) -> str:
    """Name a resource and its increase: one more of a countable resource such as hosts, else 10 % more."""
    return f"{found.resource}, {found.before} to {found.after}" if found.before.isdigit() else found.resource


def _gain(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 or share <= -0.0005 else "-"
