"""What an engine can be planned for: models and training that some program can be told. What it prices may be more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from planner.emit.programs import PROGRAMS
from planner.errors import InputError, Mistake
from planner.layout import Layout

if TYPE_CHECKING:
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


def _faults(job: Job, target: Any) -> list[tuple[str, str]]:
    """What a program refuses of the smallest layout, which asks for nothing but the model and the training."""
    layout = Layout(zero=1, recompute=("none",), layers_per_stage=(job.model.num_layers,))
    probe: Any = SimpleNamespace(
        model=job.model, training=job.training, engine=job.engine, cluster=job.cluster, layout=layout
    )
    return [fault for each in target.refuse if (fault := each.fault(probe))]
