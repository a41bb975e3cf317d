"""Compare two plans: inputs, layout, and the ledgers line by line."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic import Field

from planner.cost.ledger import LineName, Verdict
from planner.cost.transfers import unmeasured_dispatch
from planner.plan import layout_to_dict, plan_to_dict
from planner.plan_parts import WrittenLayout
from planner.specs.document import Document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.plan import Plan


class ChangedValue(Document):
    """A document's value that differs, with its path; null if one side lacks the value."""

    path: str
    before: str | None
    after: str | None


class LineDifference(Document):
    """A line of the ledger on both sides: exposed seconds of the step, or bytes of the fullest stage."""

    name: str
    before: float
    after: float


class PlanFigures(Document):
    """The totals of a plan."""

    layout: WrittenLayout
    fits: bool | None
    verdict: Verdict
    chance_of_fitting: float | None
    num_devices: int = Field(description="devices that the layout uses")
    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    peak_bytes: float = Field(description="bytes of the stage that is least likely to fit")
    fullest_stage: int
    limit_bytes: float


class Difference(Document):
    """The differences between two plans; time lines in seconds, memory lines in bytes of the fullest stage.

    not_compared: why no published run tells which step is shorter; empty if runs do.
    """

    before: PlanFigures
    after: PlanFigures
    inputs: tuple[ChangedValue, ...]
    layout: tuple[ChangedValue, ...]
    time: tuple[LineDifference, ...]
    memory: tuple[LineDifference, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether an input, the layout, a line or a total differs."""
        lines = any(each.before != each.after for each in (*self.time, *self.memory))
        return bool(self.inputs or self.layout or lines or self.before != self.after)


def figures_of(plan: Plan) -> PlanFigures:
    """The totals of a plan."""
    fullest = plan.worst_stage
    return PlanFigures(
        layout=plan.layout,
        fits=plan.fits,
        verdict=plan.verdict,
        chance_of_fitting=plan.chance_of_fitting,
        num_devices=plan.layout.world_size,
        step_seconds=plan.step_seconds,
        tokens_per_second_per_device=plan.tokens_per_second_per_device,
        mfu=plan.mfu,
        peak_bytes=fullest.total_bytes,
        fullest_stage=fullest.stage,
        limit_bytes=fullest.limit_bytes,
    )


def difference_of(before: Plan, after: Plan) -> Difference:
    """All differences between two plans, and every ledger line that at least one of the plans has."""
    return Difference(
        before=figures_of(before),
        after=figures_of(after),
        inputs=tuple(_changes(_inputs(before), _inputs(after))),
        layout=tuple(_changes(layout_to_dict(before.layout), layout_to_dict(after.layout))),
        time=_lines(_seconds(before), _seconds(after)),
        memory=_lines(_bytes(before), _bytes(after)),
        not_compared=not_compared(before, after),
    )


def not_compared(before: Plan, after: Plan) -> tuple[str, ...]:
    """Why the step times of two plans are not compared; empty if they are.

    A correction that rests on one family of publishers may be the age of its runs, and not a property of the engine.
    """
    found = []
    if before.engine.name != after.engine.name:
        alone = {plan.engine.name: plan.band.family for plan in (before, after) if plan.band and plan.band.family}
        found = [f"the corrections of {engine} rest on one family of publishers, {alone[engine]}" for engine in alone]
    once = [plan.engine.communication.dispatches_once_per_host for plan in (before, after)]
    link = max(unmeasured_dispatch(p.model, p.engine, p.cluster.pools[0], p.layout) for p in (before, after))
    if once[0] != once[1] and link:
        found.append(f"the gain of DeepEP or HybridEP over an all-to-all is not measured on {link}")
    return tuple(found)


def _inputs(plan: Plan) -> dict[str, Any]:
    document = plan_to_dict(plan)
    return {key: document[key] for key in ("model", "cluster", "training", "engine", "calibration", "options")}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[ChangedValue]:
    flat_before, flat_after = dict(_flat(before)), dict(_flat(after))
    for path in dict.fromkeys(chain(flat_before, flat_after)):
        one, other = flat_before.get(path), flat_after.get(path)
        if one != other:
            yield ChangedValue(path=path, before=one, after=other)


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a document with their paths; a list of plain values is one leaf."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list | tuple) and any(isinstance(each, dict) for each in data):
        for index, value in enumerate(data):
            name = value.get("name", index) if isinstance(value, dict) else index
            yield from _flat(value, f"{path}.{name}")
    elif isinstance(data, list | tuple):
        words = list(map(str, data))
        yield path, words[0] if words and len(set(words)) == 1 else "/".join(words)
    elif data is not None:
        yield path, str(data)


def _seconds(plan: Plan) -> dict[str, float]:
    return {line.name.value: float(line.exposed_seconds) for line in plan.time}


def _bytes(plan: Plan) -> dict[str, float]:
    fullest = figures_of(plan).fullest_stage
    lines = next(stage.lines for stage in plan.memory if stage.stage == fullest)
    return {line.name.value: float(line.num_bytes) for line in lines}


def _lines(before: dict[str, float], after: dict[str, float]) -> tuple[LineDifference, ...]:
    order = [name.value for name in LineName]
    names = sorted({*before, *after}, key=order.index)
    return tuple(LineDifference(name=name, before=before.get(name, 0.0), after=after.get(name, 0.0)) for name in names)
