"""Compares a finished run's measurements with the plan that it ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.plan import Plan

_TOTAL: Final = {
    "cuda": "peak of allocated memory; the plan's total also counts the runtime",
    "cpu": "peak of resident memory, with the libraries",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One quantity of the plan, and its measurement.

    stage: pipeline stage of a memory line; None for times.
    unit: either `bytes` or `seconds`.

    `planned` and `measured` are None if there is no such number; `note` gives the reason.
    """

    name: str
    stage: int | None
    planned: float | None
    measured: float | None
    unit: str
    note: str = ""

    @property
    def relative_error(self) -> float | None:
        """Ratio measured / planned, minus one; None if a value is unknown or the planned value is zero."""
        if self.planned is None or self.measured is None or self.planned == 0:
            return None
        return self.measured / self.planned - 1


def compare(plan: Plan, measurements: dict[str, Any]) -> tuple[Deviation, ...]:
    """Join a plan's ledger with DIR/measurements.json by line name: the step, times, then memory by stage."""
    step = Deviation(
        name="step",
        stage=None,
        planned=plan.step_seconds,
        measured=measurements.get("step_seconds"),
        unit="seconds",
        note="median of the steps after warm-up",
    )
    return (step, *_times(plan, measurements), *_memories(plan, measurements))


def _times(plan: Plan, measurements: dict[str, Any]) -> list[Deviation]:
    """The time lines of the plan; lines that a run measures together become one, under the first name."""
    planned = {str(line.name): float(line.exposed_seconds) for line in plan.time}
    found = {name: measurements.get("time", {}).get(name, {}) for name in planned}
    within = {other: name for name in planned for other in found[name].get("includes", ())}
    return [
        Deviation(
            name=name,
            stage=None,
            planned=seconds + sum_of(planned.get(other, 0.0) for other in found[name].get("includes", ())),
            measured=found[name].get("seconds"),
            unit="seconds",
            note=_note(found[name], planned),
        )
        for name, seconds in planned.items()
        if name not in within
    ]


def _note(found: dict[str, Any], planned: dict[str, float]) -> str:
    together = [name for name in found.get("includes", ()) if name in planned]
    return f"with {', '.join(together)}" if together else found.get("reason", "not in the measurements")


def _memories(plan: Plan, measurements: dict[str, Any]) -> list[Deviation]:
    deviations = []
    for stage in plan.memory:
        for line in stage.lines:
            found = measurements.get("memory", {}).get(line.name, {})
            deviations.append(
                Deviation(
                    name=line.name,
                    stage=stage.stage,
                    planned=float(line.num_bytes),
                    measured=_at(found.get("num_bytes"), stage.stage),
                    unit="bytes",
                    note=found.get("reason", "not in the measurements"),
                )
            )
        deviations.append(
            Deviation(
                name="total",
                stage=stage.stage,
                planned=stage.total_bytes,
                measured=_at(measurements.get("peak_memory_bytes"), stage.stage),
                unit="bytes",
                note=_TOTAL.get(measurements.get("device_kind", ""), "not in the measurements"),
            )
        )
    return deviations


def _at(per_stage: list[float | None] | None, stage: int) -> float | None:
    return per_stage[stage] if per_stage is not None and stage < len(per_stage) else None
