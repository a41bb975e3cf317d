"""What an engine can be planned for: models and training that some program can be told. What it prices may be more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from planner.emit.programs import PROGRAMS
from planner.errors import InputError, Mistake
from planner.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Collection

    from planner.specs.job import Job


def check_plannable(job: Job) -> None:
    """Refuse a search whose plan no program of the engine could carry out, whatever its layout.

    A profile prices published runs of any kind; `planner explain` shows them. Profiles that name no program plan
    everything that they price, and say that nothing can be emitted.

    Raises:
        InputError: what the programs cannot be told, by the one that the engine's users have.
    """
    faults = [_faults(job, PROGRAMS[name]) for name in job.engine.emits if name in PROGRAMS]
    if faults and all(faults):
        where = f"--engine {job.engine.name}"
        hint = "`planner explain --layout` prices it all the same"
        raise InputError(*(Mistake(message=text, where=where, hint=f"{way}; {hint}") for text, way in faults[0]))


def unplannable(job: Job, pinned: Collection[str]) -> tuple[str, ...]:
    """What a search must leave out, as `--forbid` writes it: axes that no program of the engine can be told.

    pinned: keys of the user's own pins, which are priced as they are.
    """
    targets = [PROGRAMS[name] for name in job.engine.emits if name in PROGRAMS]
    axes = [axis for axis in ("tp", "pp", "cp", "ep") if axis in job.engine.can.axes and axis not in pinned]
    return tuple(f"{axis}>=2" for axis in axes if targets and all(_faults(job, each, axis) for each in targets))


def _faults(job: Job, target: Any, axis: str = "") -> list[tuple[str, str]]:
    """What a program refuses of the smallest layout, which asks for nothing but the model, the training and an axis."""
    stages, stage = (2, job.model.num_layers // 2) if axis == "pp" else (1, job.model.num_layers)
    zeros = (job.engine.pipeline if axis == "pp" else job.engine.can).zero_stages
    layout = Layout(
        zero=1 if 1 in zeros else max(zeros, default=0),
        recompute=("none",) * stages,
        layers_per_stage=(stage,) * (stages - 1) + (job.model.num_layers - stage * (stages - 1),),
    )
    degree: dict[str, Any] = {axis: 2} if axis else {}
    layout = replace(layout, **degree)
    probe: Any = SimpleNamespace(
        model=job.model, training=job.training, engine=job.engine, cluster=job.cluster, layout=layout
    )
    return [fault for each in target.refuse if (fault := each.fault(probe))]
