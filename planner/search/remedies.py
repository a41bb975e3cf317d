"""What would make a job fit that does not: single changes, each one verified by solving."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.errors import InputError
from planner.search.search import fastest_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.layout import Layout
    from planner.search.constraints import Constraints
    from planner.specs.job import Job

__all__ = ["Remedy", "remedies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change that makes the job fit, verified by solving."""

    change: str
    layout: Layout
    step_seconds: float


def remedies(job: Job, constraints: Constraints) -> tuple[Remedy, ...]:
    """Changes that make the job fit; of each kind the smallest one that does, of pins each one that does."""
    found: list[Remedy] = []
    for changes in (_more_hosts(job), _shorter_sequences(job), _less_headroom(job), _fewer_pins(job, constraints)):
        for change, other_job, other_constraints in changes:
            try:
                best = fastest_layout(other_job, other_constraints or constraints)
            except InputError:
                continue
            if best is not None:
                found.append(Remedy(change=change, layout=best[0], step_seconds=best[1]))
                if other_constraints is None:
                    break  # the smallest change of its kind; of the pins, each one is worth knowing
    return tuple(found)


_Change = tuple[str, "Job", "Constraints | None"]


def _more_hosts(job: Job) -> Iterator[_Change]:
    for factor in (2, 4, 8, 16, 32, 64):
        hosts = job.cluster.hosts * factor
        if job.cluster.links[-1].num_devices is None:
            cluster = job.cluster.model_copy(update={"hosts": hosts})
            yield f"{hosts} hosts instead of {job.cluster.hosts}", replace(job, cluster=cluster), None


def _shorter_sequences(job: Job) -> Iterator[_Change]:
    for factor in (2, 4, 8, 16):
        length = job.training.sequence_length // factor
        if length >= 1:
            training = job.training.model_copy(update={"sequence_length": length})
            yield f"sequences of {length} tokens", replace(job, training=training), None


def _less_headroom(job: Job) -> Iterator[_Change]:
    if job.headroom > 0:
        yield "no headroom", replace(job, headroom=0.0), None


def _fewer_pins(job: Job, constraints: Constraints) -> Iterator[_Change]:
    for pin in constraints.pins:
        yield f"without the pin {pin}", job, constraints.without(pin)
