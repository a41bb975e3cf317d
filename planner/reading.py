"""Reads plans and checks them: the layout by the rules for its documents, and the figures by pricing the plan again.

A plan that was made with other formulas gets new prices. Pricing cannot prove again that the
plan is optimal, so the plan names the version of the planner that made the proof.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from planner.answers.plan_inputs import constraints_of, job_of
from planner.cost.estimate import estimate
from planner.errors import InputError, Mistake
from planner.made_by import with_corrections
from planner.plan import plan_to_dict
from planner.plan_file import edited, parse_plan, plan_text
from planner.search.given import plan_for_layout, plan_of
from planner.search.near_ties import minimum, runner_up
from planner.search.objectives import objective_of
from planner.search.space.rules import broken_rules
from planner.specs.files import limited_text
from planner.specs.mistakes import Mistakes
from planner.specs.text import printable
from planner.specs.training_document import check_training
from planner.specs.yaml import Node
from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TextIO

    from planner.layout import Layout
    from planner.plan import Plan
    from planner.specs.calibration import Calibration
    from planner.specs.job import Job

_SAME: Final = 1e-9
"""Relative difference below which two figures count as equal, for example from two machines."""

_MOST_NAMED: Final = 4
_NOT_PRICED: Final = (
    "made_by",
    "assumed",
    "idle_reason",
    "batch_choice",
    "certificate",
    "proved_by",
    "options",
    "checksum",
    "minimum.keys.unseen",  # rests on evidence, which the plan does not contain
)


def read_plan(path: Path, *, source: TextIO | None = None, tell: Callable[[str], None] = lambda _: None) -> Plan:
    """Read a plan, from standard input for `-`, and check it; `planner.plan_file.plan_from_file` makes fewer checks.

    source: a stream to read instead of standard input.
    tell: receives one sentence if another version made the plan, with the figures of both versions.

    The returned plan has this version's figures.

    Raises:
        InputError: the text is not a plan or has another format, its layout breaks rules (all are named), or the plan
            was edited (the first figures that differ are named).
        EnvironmentProblem: the file cannot be read.
    """
    if str(path) == "-":
        return _checked(limited_text((source or sys.stdin).buffer, "standard input"), "standard input", tell)
    return _checked(plan_text(path), printable(str(path)), tell)


def corrected(plan: Plan, corrections: Calibration) -> Plan:
    """The plan's layout, priced with the corrections of a calibration instead of the plan's own."""
    return replace(plan_for_layout(with_corrections(job_of(plan), corrections), plan.layout), options=plan.options)


def _checked(text: str, name: str, tell: Callable[[str], None]) -> Plan:
    plan, is_edited = parse_plan(text, name=name)
    job = job_of(plan)
    _check_documents(plan, job, name)
    if broken := _broken(job, plan.layout):
        raise InputError(*(Mistake(message=f"this layout cannot run: {why}", where=name) for why in broken))
    now = _priced_now(plan, job)
    if not all(map(math.isfinite, (now.step_seconds, now.mfu, *(stage.total_bytes for stage in now.memory)))):
        raise InputError(f"{name} cannot be priced: its documents hold numbers that are too large")
    if plan.made_by != now.made_by and not is_edited:
        tell(_news(plan, now))
        return now
    differences = list(_differences(plan_to_dict(plan), plan_to_dict(now))) if plan.made_by == now.made_by else []
    if is_edited or differences:
        more = [f"and {len(differences) - _MOST_NAMED} more"] if len(differences) > _MOST_NAMED else []
        raise edited(name, *differences[:_MOST_NAMED], *more)
    return plan


def _check_documents(plan: Plan, job: Job, name: str) -> None:
    """Check the conditions that several documents have to meet together, and the options.

    Raises:
        InputError: a condition does not hold; the error lists every mistake.
    """
    mistakes, training = Mistakes(), plan.training
    tree = {
        key: Node(data=getattr(training, key), where=f"{name}: training.{key}")
        for key in ("sequence_length", "global_batch_size", "precision")
    }
    check_training(mistakes, Node(data=tree, where=name), plan.model, plan.cluster.pools, plan.engine)
    mistakes.attempt(constraints_of, plan)
    mistakes.attempt(objective_of, job, plan.options.objective)
    mistakes.raise_if_any()


def _broken(job: Job, layout: Layout) -> tuple[str, ...]:
    """The rules that the layout breaks, as `--layout` would name them."""
    held, layers = sum(layout.layers_per_stage), job.model.num_layers
    if held != layers:
        return (f"`layers_per_stage` sums to {held}, and {job.model.name} has {layers} layers",)
    return broken_rules(job, layout, except_for=("schedule",))


def _priced_now(plan: Plan, job: Job) -> Plan:
    """The plan with the figures of this version; if another version proved the plan, `proved_by` names it.

    Runners-up that can no longer run are left out.
    """
    priced, objective = estimate(job, plan.layout), objective_of(job, plan.options.objective)
    now = plan_of(job, plan.layout, priced)
    best = plan.minimum.layout if plan.minimum and not _broken(job, plan.minimum.layout) else None
    runs = [each for each in (*plan.runners_up, plan.own) if each and not _broken(job, each.layout)]
    beside = [runner_up(job, plan.layout, priced, each.layout, estimate(job, each.layout), objective) for each in runs]
    is_own, measured = plan.own in runs, plan.with_runs
    if measured:
        seconds = None if _broken(job, measured.layout) else estimate(job, measured.layout).step_seconds
        measured = replace(measured, step_seconds=seconds) if seconds else None
    proved_by = plan.proved_by or plan.made_by
    chances = plan if plan.made_by.calibration == "own" else now  # the plan does not contain a user's evidence
    band = chances.band
    return replace(
        now,
        band=band,
        deadline_chance=chances.deadline_chance,
        budget_chance=chances.budget_chance,
        low_step_seconds=now.step_seconds * band.low if band else None,
        high_step_seconds=now.step_seconds * band.high if band else None,
        minimum=minimum(job, plan.layout, priced, best, objective) if best else None,
        runners_up=tuple(beside[:-1] if is_own else beside),
        with_runs=measured,
        own=beside[-1] if is_own else None,
        idle_reason=plan.idle_reason,
        batch=plan.batch,
        certificate=plan.certificate,
        proved_by=proved_by if plan.certificate and proved_by != now.made_by else None,
        options=plan.options,
        assumed=plan.assumed,
    )


def _news(plan: Plan, now: Plan) -> str:
    """A sentence that another version made the plan, with the step times of that version and of this version."""
    others = "" if plan.made_by.planner_version != now.made_by.planner_version else " and other formulas"
    said, says = format_seconds(plan.step_seconds), format_seconds(now.step_seconds)
    fits = "" if plan.verdict == now.verdict else f", and that it {now.verdict}"
    maker = printable(f"planner {plan.made_by.planner_version}{others}", 80)
    return f"this plan was made with {maker}: it said {said}, this version says {says}{fits}"


def _differences(said: Any, priced: Any, path: str = "") -> Iterator[str]:
    """Sentences about the figures in which two plan documents differ."""
    if isinstance(said, dict) and isinstance(priced, dict):
        for key in said:
            if (inner := f"{path}.{key}" if path else key) not in _NOT_PRICED:
                yield from _differences(said[key], priced.get(key), inner)
    elif isinstance(said, list) and isinstance(priced, list) and len(said) == len(priced):
        for index, (one, other) in enumerate(zip(said, priced, strict=True)):
            yield from _differences(one, other, f"{path}[{index}]")
    elif isinstance(said, str) and isinstance(priced, str):
        return  # wording may differ between versions
    elif not _same(said, priced):
        yield f"{path} is {_figure(said)}, and priced again {_figure(priced)}"


def _same(said: Any, priced: Any) -> bool:
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in (said, priced)):
        return bool(said == priced)
    return bool(abs(said - priced) <= _SAME * max(abs(said), abs(priced)))


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value) if isinstance(value, int | float | str | None) else "an object"
