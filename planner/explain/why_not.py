"""Why not this instead: the alternative is forced, solved, and set against the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.cost.segments import with_segment
from planner.errors import EnvironmentProblem, InputError
from planner.explain.outcome import Outcome, outcome_of_layout, outcome_of_search
from planner.explain.plan_inputs import constraints_of, job_of
from planner.plan import layout_from_dict
from planner.search.space.constraints import Constraints
from planner.specs.document import Document
from planner.specs.text import printable
from planner.specs.yaml import read_text

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.plan import Plan
    from planner.search.reporter import Reporter

_OPTION: Final = "--why-not"


class WhyNot(Document):
    """What was asked for, the pins under which it was planned (none for a whole layout), and what came of it."""

    asked: str
    pins: tuple[str, ...]
    outcome: Outcome


def why_not(plan: Plan, asked: str, reporter: Reporter | None = None) -> WhyNot:
    """Force an alternative: pins such as `tp=4,zero=3`, or a file with a layout or a plan.

    Pins are solved under the plan's own pins on other keys, as `planner plan --pin` would; a file's layout is priced
    as it is.

    Raises:
        InputError: neither pins nor a file with a layout, or a layout for another model.
        EnvironmentProblem: the file cannot be read.
    """
    job = job_of(plan)
    if "=" not in asked:
        layout = with_segment(job.cluster, _read_layout(asked, plan))
        return WhyNot(asked=asked, pins=(), outcome=outcome_of_layout(plan, job, layout))
    constraints = _forced(plan, asked)
    pins = tuple(map(str, constraints.pins))
    return WhyNot(asked=asked, pins=pins, outcome=outcome_of_search(plan, job, constraints, reporter))


def _forced(plan: Plan, asked: str) -> Constraints:
    """The plan's constraints, with those on the keys that are asked about replaced."""
    own, wanted = constraints_of(plan), Constraints.parse([asked], option=_OPTION)
    keys = {pin.key for pin in wanted.pins}
    kept = tuple(pin for pin in own.pins if pin.key not in keys)
    allowed = tuple(each for each in own.forbidden if not keys & {condition.key for condition in each})
    return replace(own, pins=(*kept, *wanted.pins), forbidden=allowed)


def _read_layout(name: str, plan: Plan) -> Layout:
    """The layout in a file: the `layout` of a plan document, or that object alone."""
    where = f"{_OPTION} {printable(name)}"
    if not name.endswith(".json"):
        hint = "write a layout such as tp=4, or name a JSON file with a layout or a plan"
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
