"""Plan a changed job (what if), and compute the gain from 10 % more of each resource."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field
from rich.text import Text

from planner.answers.difference import PlanFigures, figures_of, not_compared
from planner.answers.outcome import Outcome, outcome_body, outcome_of, outcome_of_search, plan_again, tried
from planner.answers.plan_inputs import constraints_of, job_of
from planner.cost.estimate import estimate
from planner.errors import InputError
from planner.plan import Plan
from planner.plan_parts import ObjectiveName, WrittenLayout
from planner.search.given import plan_for_layout
from planner.search.near_ties import slower_by
from planner.search.objectives import Objective
from planner.show.columns import Columns, assignments
from planner.show.screen import clean, indented, section, stack
from planner.show.words import saved_words, short_layout
from planner.specs.change import change_job
from planner.specs.document import Document
from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Group, RenderableType

    from planner.layout import Layout
    from planner.search.objectives import Rank
    from planner.search.reporter import Reporter
    from planner.specs.job import Job, PoolJob


class WhatIf(Document):
    """A change of the job, the plan's own layout after the change, and the best plan after the change."""

    asked: str
    step_seconds: float = Field(description="step of the plan without the change")
    best_step_seconds: float | None = Field(
        description="step of the best layout without the change, if the user gave the plan's layout; null if the "
        "search chose it"
    )
    same_layout: PlanFigures | None = Field(
        description="the plan's own layout, priced after the change; null if the layout is illegal"
    )
    outcome: Outcome
    not_compared: tuple[str, ...] = Field(
        default=(), description="why no published run tells whether the change makes the step shorter"
    )


class Gain(Document):
    """The gain from more of one resource after planning again: the saved share of the objective's quantity.

    This is the share by which the step gets shorter, or under `cost`, cheaper. Under `gpus` it is the share of devices
    that is saved; if as many are needed, it is the share by which the step gets shorter.
    """

    resource: str
    change: str = Field(description="the planned change, in the syntax of --what-if")
    before: str
    after: str
    same_layout_gain: float | None = Field(description="gain with the plan's own layout; null if the layout is illegal")
    gain: float = Field(description="gain after planning again, compared with the best plan for the present resources")
    step_seconds: float
    layout: WrittenLayout = Field(description="the best layout with the change")
    other_layout: bool


class Sensitivity(Document):
    """The gain from 10 % more of each resource (10 % less of a delay), largest first."""

    objective: ObjectiveName
    step_seconds: float = Field(description="step of the best plan for the present resources")
    gains: tuple[Gain, ...]


def what_if(plan: Plan, asked: str, reporter: Reporter | None = None, *, search: bool = True) -> WhatIf:
    """Change the job (specs/change.py), price the plan's layout again, and plan again under the plan's pins.

    A layout from the user may be far from the best. The best layout without the change is therefore also computed, to
    separate the gain of the change from the gain of planning. Without `search` only the plan's layout is priced, and
    the outcome is its own.

    Raises:
        InputError: an unknown path or a bad value.
    """
    job = change_job(job_of(plan), asked)
    priced = tried(lambda: plan_for_layout(job, plan.layout))
    same = priced if isinstance(priced, Plan) else None
    best = _best(plan, job_of(plan)) if search and not plan.certificate else None
    outcome = outcome_of_search(plan, job, constraints_of(plan), reporter) if search else outcome_of(plan, priced)
    reasons = not_compared(plan, same) if same else outcome.difference.not_compared if outcome.difference else ()
    return WhatIf(
        asked=asked,
        step_seconds=plan.step_seconds,
        best_step_seconds=best.step_seconds if best else None,
        same_layout=figures_of(same) if same else None,
        outcome=outcome,
        not_compared=reasons,
    )


def _best(plan: Plan, job: Job) -> Plan | None:
    """The best plan of a job by the objective and under the pins of `plan`; None if no layout is legal or fits."""
    found = tried(lambda: plan_again(plan, job, constraints_of(plan), top=0, within=0.0))
    return found if isinstance(found, Plan) and found.fits else None


def fastest_seconds(plan: Plan, reporter: Reporter | None = None) -> float | None:
    """The step of the fastest layout for the job of a given layout; None if no layout that fits is faster."""
    from planner.search.search import fastest_layout  # other answers only price
    from planner.search.space.arrays import AGREEMENT

    job = job_of(plan)
    try:
        found = fastest_layout(job, constraints_of(plan), reporter, known=plan.layout)
    except InputError:  # no legal layout
        return None
    return found[1] if found and found[1] < plan.step_seconds * (1 - AGREEMENT) else None


# --- 10 % more --------------------------------------------------------------------------------------------------


def sensitivity_of(plan: Plan, tell: Callable[[str], None] = lambda _: None, *, search: bool = True) -> Sensitivity:
    """Plan again with 10 % more of each resource; `tell` is called with the name of each resource before its search.

    Without `search`, and for a layout that the user gave, the plan's layout is the only one: the question is about it.

    Raises:
        InputError: the plan's pins leave no layout.
    """
    job = job_of(plan)
    tell("what is there now")
    searches = search and plan.certificate is not None
    own = plan.layout, estimate(job, plan.layout).step_seconds
    layout, seconds = _best_with(plan, job, plan.layout) if searches else own
    gains = []
    for resource, change, before, after in _resources(job):
        tell(f"10 % more of each: {resource}")
        changed = change_job(job, change)
        priced = tried(partial(plan_for_layout, changed, plan.layout))
        same = priced.step_seconds if isinstance(priced, Plan) else None
        best = _best_with(plan, changed, layout) if searches else (layout, same or seconds)
        ranks = zip(_rank(plan, job, layout, seconds), _rank(plan, changed, *best), strict=True)
        gains.append(
            Gain(
                resource=resource,
                change=change,
                before=before,
                after=after,
                same_layout_gain=None if same is None else 1 - same / plan.step_seconds,
                gain=next((1 - then / now for now, then in ranks if then != now), 0.0),
                step_seconds=best[1],
                layout=best[0],
                other_layout=best[0] != layout,
            )
        )
    ordered = tuple(sorted(gains, key=lambda each: (-each.gain, each.resource)))
    return Sensitivity(objective=plan.options.objective, step_seconds=seconds, gains=ordered)


def _best_with(plan: Plan, job: Job, known: Layout) -> tuple[Layout, float]:
    """The better of a known layout and the best layout of a job, and its step seconds."""
    from planner.search.search import fastest_layout  # other answers only price

    priced = estimate(job, known)
    own = known, priced.step_seconds
    if plan.options.objective == "throughput":  # a search that knows the layout is several times as fast
        best = fastest_layout(job, constraints_of(plan), known=known)
    else:
        found = _best(plan, job)
        best = (found.layout, found.step_seconds) if found else None
    if best is None or (priced.fits and _rank(plan, job, *own) <= _rank(plan, job, *best)):
        return own
    return best


def _rank(plan: Plan, job: Job, layout: Layout, seconds: float) -> Rank:
    """The rank of a layout by the plan's objective."""
    objective = Objective(name=plan.options.objective)
    first, second = objective.rank(seconds, objective.devices_of(job, layout))
    return float(first), float(second)


def _resources(job: Job) -> Iterator[tuple[str, str, str, str]]:
    """Each resource: its name, the change, and the values before and after, in the form of the document.

    On a mixed cluster each pool has its own resources, and the link between pools is one more.
    """
    between = job.cluster.between
    for pool in job.pools:
        name, path = (f"{pool.cluster.name} ", f"{pool.cluster.name}.") if between else ("", "")
        yield from _of_device(pool, name, f"{path}device.")
        yield from _of_links(pool, name, path)
        yield from _hosts(pool, f"{name}hosts", f"{path}hosts" if between else "nodes")
    if between is not None:
        yield from _of_link(between.model_dump(), "between pools", "between.")


def _of_device(job: PoolJob, name: str, path: str) -> Iterator[tuple[str, str, str, str]]:
    device, precision = job.cluster.device.model_dump(mode="json"), job.training.precision
    peaks = [p for p in dict.fromkeys((precision, job.core_precision)) if p in device["peak"]]
    yield (
        f"{name}peak FLOP/s",
        ",".join(f"{path}peak.{p}=+10%" for p in peaks),
        device["peak"][precision],
        _times(device["peak"][precision], 1.1),
    )
    yield _quantity(f"{name}memory bandwidth", f"{path}memory_bandwidth", device["memory_bandwidth"], "+10%")
    yield _quantity(f"{name}memory", f"{path}memory", device["memory"], "+10%")
    if float(job.cluster.device.efficiency.launch) > 0:
        launch = device["efficiency"]["launch"]
        change = f"{path}efficiency.launch=-10%,{path}efficiency.layer_floor=-10%"
        yield f"{name}host overhead", change, launch, _times(launch, 0.9)


def _of_links(job: PoolJob, name: str, path: str) -> Iterator[tuple[str, str, str, str]]:
    for link in job.cluster.model_dump(mode="json")["links"] if job.num_devices > 1 else ():
        yield from _of_link(link, f"{name}{link['name']}", f"{path}{link['name']}.")


def _of_link(link: dict[str, str], name: str, path: str) -> Iterator[tuple[str, str, str, str]]:
    yield _quantity(f"{name} bandwidth", f"{path}bandwidth", link["bandwidth"], "+10%")
    yield _quantity(f"{name} latency", f"{path}latency", link["latency"], "-10%")


def _hosts(job: PoolJob, name: str, path: str) -> Iterator[tuple[str, str, str, str]]:
    hosts, outermost = math.ceil(job.cluster.hosts * 1.1), job.cluster.links[-1].num_devices
    if hosts > job.cluster.most_hosts:
        return
    if outermost is None or outermost >= hosts * job.cluster.devices_per_host:
        yield name, f"{path}={hosts}", str(job.cluster.hosts), str(hosts)


def _quantity(resource: str, path: str, before: str, change: str) -> tuple[str, str, str, str]:
    return resource, f"{path}={change}", before, _times(before, 1.1 if change[0] == "+" else 0.9)


def _times(quantity: str, factor: float) -> str:
    number, _, unit = quantity.partition(" ")
    return f"{float(number) * factor:.6g} {unit}"


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
