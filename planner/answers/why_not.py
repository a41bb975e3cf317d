"""Answer why the plan is not another layout: force the alternative, solve it, and compare it with the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field
from rich.text import Text

from planner.answers.outcome import (
    Outcome,
    Shortfall,
    outcome_body,
    outcome_of,
    outcome_of_search,
    rules_of,
    shortfall_of,
    tried,
)
from planner.answers.plan_inputs import constraints_of, job_of
from planner.cost.segments import with_segment
from planner.errors import EnvironmentProblem, InputError
from planner.layout import format_layout, stage_of_chunk
from planner.plan_file import layout_from_dict
from planner.search.given import plan_for_layout, plan_for_text
from planner.search.near_ties import slower_by
from planner.search.space.constraints import Constraints
from planner.show.screen import clean, indented, stack
from planner.specs.document import Document
from planner.specs.recompute import is_of_some_layers, number_of_layers, policy_code
from planner.specs.text import printable
from planner.specs.yaml import read_text
from planner.units import format_bytes, format_seconds
from planner.verdict import chance_words

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from planner.answers.difference import Difference
    from planner.layout import Layout
    from planner.plan import Plan
    from planner.search.reporter import Reporter
    from planner.specs.job import Job


_OPTION: Final = "--why-not"


class WhyNot(Document):
    """The alternative, its pins (none for a whole layout), and the result."""

    asked: str
    pins: tuple[str, ...]
    outcome: Outcome
    alone: Shortfall | None = Field(
        default=None, description="the plan's layout with only the pins changed, if this layout does not fit"
    )
    alone_step_seconds: float | None = Field(
        default=None, description="step of the plan's layout with only the pins changed, if this layout fits"
    )
    alone_rules: tuple[str, ...] = Field(
        default=(), description="rules that the plan's layout with only the pins changed breaks"
    )
    also: tuple[str, ...] = Field(default=(), description="further differences from the plan, in words")


def why_not(plan: Plan, asked: str, reporter: Reporter | None = None) -> WhyNot:
    """Force an alternative: pins such as `tp=4,zero=3`, or a file with a layout or a plan.

    Pins are solved together with the plan's own pins on other keys, as `planner plan --pin` would do. A layout from a
    file is priced without a search.

    Raises:
        InputError: the text is neither pins nor a file with a layout, or the layout is for another model.
        EnvironmentProblem: the file cannot be read.
    """
    job = job_of(plan)
    if "=" not in asked:
        layout = with_segment(job.cluster, _read_layout(asked, plan))
        return WhyNot(asked=asked, pins=(), outcome=outcome_of(plan, tried(lambda: plan_for_layout(job, layout))))
    constraints, wanted = _forced(plan, asked), Constraints.parse([asked], option=_OPTION)
    pins, outcome = tuple(map(str, constraints.pins)), outcome_of_search(plan, job, constraints, reporter)
    forced = {pin.key for pin in wanted.pins}
    also = _also(outcome.difference, forced) if outcome.difference else ()
    return WhyNot(asked=asked, pins=pins, outcome=outcome, also=also, **_alone(plan, job, wanted))


def _also(found: Difference, forced: set[str]) -> tuple[str, ...]:
    """Keys other than the forced ones in which the alternative differs from the plan.

    The list leaves out dp, which follows from the other degrees.
    """
    words = []
    for changed in found.layout:
        if changed.path in forced or changed.path in ("dp", "layers_per_stage", "sp", "hsdp", "etp"):
            continue
        if changed.path == "recompute":
            words.append(_recomputed(found.after.layout))
        else:
            words.append(f"{changed.path}={changed.after}")
    return tuple(words)


def _recomputed(layout: Layout) -> str:
    """The recompute in words, such as `1 of 10 layers of stage 0 recomputed (full)` or `nothing recomputed`."""
    again = [(chunk, policy) for chunk, policy in enumerate(layout.recompute) if policy != "none"]
    if not again:
        return "nothing recomputed"
    stages = sorted({int(stage_of_chunk(layout.schedule, layout.pp, chunk)) for chunk, _ in again})
    count = sum(_recomputing(layout.layers_per_stage[chunk], policy_code(policy)) for chunk, policy in again)
    of = sum(layout.layers_of_stage(stage) for stage in (stages if len(stages) == 1 else range(layout.pp)))
    policies = " and ".join(dict.fromkeys(policy for _, policy in again))
    where = f" of stage {stages[0]}" if len(stages) == 1 and layout.pp > 1 else ""
    return f"{'all' if count == of else f'{count} of {of}'} layers{where} recomputed ({policies})"


def _recomputing(num_layers: int, code: int) -> int:
    """How many of a chunk's layers recompute: all, k of `full:k`, or every n-th of `every:n`."""
    if not is_of_some_layers(code):
        return num_layers
    is_every, number = number_of_layers(code)
    return num_layers // int(number) if is_every else min(int(number), num_layers)


def _alone(plan: Plan, job: Job, wanted: Constraints) -> dict[str, Any]:
    """The fields of `WhyNot` for the plan's layout with only the pinned keys changed, and keys that follow from them.

    The fields are empty if a pin is a range, because a range does not fix a single layout.
    """
    empty = {"alone": None, "alone_step_seconds": None, "alone_rules": ()}
    text = dict(part.split("=", 1) for part in format_layout(plan.layout).split(","))
    pins = {pin.key: pin.value for pin in wanted.pins if pin.sign == "="}
    if len(pins) < len(wanted.pins):
        return empty
    follows = {"dp", "hsdp"} if {"tp", "pp", "cp"} & set(pins) else set()
    if "tp" in pins:
        follows |= {"sp", "etp"} if plan.layout.etp > 1 else {"sp"}
    if {"pp", "interleave", "schedule"} & set(pins):
        follows |= {"layers_per_stage", "mtp", "schedule"}
        if len(set(plan.layout.recompute)) > 1:
            follows.add("recompute")
    kept = {key: value for key, value in text.items() if key not in follows}
    try:
        found = plan_for_text(job, ",".join(f"{key}={value}" for key, value in (kept | pins).items()), option=_OPTION)
    except InputError as error:
        return empty | {"alone_rules": rules_of(error)}
    if found.fits:
        return empty | {"alone_step_seconds": found.step_seconds}
    return empty | {"alone": shortfall_of(found.layout, found.memory)}


def _forced(plan: Plan, asked: str) -> Constraints:
    """The plan's constraints, with the pins on the asked keys replaced."""
    own, wanted = constraints_of(plan), Constraints.parse([asked], option=_OPTION)
    keys = {pin.key for pin in wanted.pins}
    kept = tuple(pin for pin in own.pins if pin.key not in keys)
    allowed = tuple(each for each in own.forbidden if not keys & {condition.key for condition in each})
    return replace(own, pins=(*kept, *wanted.pins), forbidden=allowed)


def _read_layout(name: str, plan: Plan) -> Layout:
    """The layout in a file: a plan document with the key `layout`, or only the layout object."""
    where = f"{_OPTION} {printable(name)}"
    if not name.endswith(".json"):
        hint = "write a layout such as tp=4, or name a JSON file with a layout or a plan"
        if isfile(name):  # noqa: PTH113 - it accepts names of any length
            hint = "`planner plan --from FILE CLUSTER` sets the layout of a script beside the best one"
        raise InputError(f"`{printable(name, 60)}` is no layout", where=where, hint=hint)
    try:
        data = json.loads(read_text(Path(name), printable(name)))
        layout = layout_from_dict(data.get("layout", data))
    except (EnvironmentProblem, InputError):
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, IndexError, ZeroDivisionError) as error:
        hint = "the file holds a plan, or its `layout` alone"
        raise InputError(f"no layout: {printable(str(error), 200)}", where=where, hint=hint) from None
    layers = sum(layout.layers_per_stage)
    if layers != plan.model.num_layers:
        raise InputError(
            f"this layout has {layers} layers", where=where, hint=f"{plan.model.name} has {plan.model.num_layers}"
        )
    return layout


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
    names = "plan", asked if len(asked) <= 16 else "instead"
    return stack(title, _changed_alone(found), verdict, *outcome_body(found.outcome, names=names))


def _changed_alone(found: WhyNot) -> RenderableType | None:
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
