"""Refuse pins and objectives that no configuration of a job can meet, before the search starts."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from planner.cost.recompute import absent_modules
from planner.cost.run import price_of
from planner.cost.schedule import EXECUTED
from planner.cost.stage import pattern_of
from planner.errors import InputError, Mistake
from planner.layout import balanced_chunks
from planner.search.space.placements import most_layers_on
from planner.specs.banned import bans_of
from planner.specs.by_name import other_engines
from planner.specs.text import any_of

if TYPE_CHECKING:
    from planner.search.objectives import Objective
    from planner.search.space.constraints import Constraints
    from planner.specs.engine import EngineSpec
    from planner.specs.job import Job

_LISTS = ("layers_per_stage", "recompute")  # pins with an entry for each chunk
_AXES: Final = ("tp", "pp", "dp", "cp", "ep", "etp")
_OFFERED: Final = {
    **dict.fromkeys(_AXES, "can.axes"),
    "schedule": "pipeline.schedules",
    "offload": "offload.what",
    "recompute": "can.recompute",
    "sp": "can.sp",
}
"""For each key, the field of the engine profile that lists the key's allowed values; for a degree, the list of axes."""


def check_constraints(job: Job, constraints: Constraints) -> None:
    """Refuse pins that no configuration can meet.

    Raises:
        InputError: the engine lacks a pinned value, or the search cannot choose a pinned list.
    """
    _check_pins(job, constraints)
    _check_lists(job, constraints)
    _check_pools(job, constraints)


def check_objective(job: Job, objective: Objective) -> None:
    """Check that either all pools of a mixed cluster have prices or none has."""
    priced = {pool.cluster.name: price_of(pool.cluster, job.training) is not None for pool in job.pools}
    if objective.name == "cost" and len(set(priced.values())) > 1:
        missing = next(name for name, given in priced.items() if not given)
        hint = f"--set '{missing}.price=2.50 USD/h per device', or --set 'training.price=2 USD/h per device' for all"
        raise InputError(f"pool {missing} has no price, and others have", where="--objective cost", hint=hint)


def _check_pools(job: Job, constraints: Constraints) -> None:
    """Refuse pins that a mixed cluster does not support.

    A pinned list must name its pools, and the stages of a pool must be consecutive.
    """
    schedule = constraints.value_of("schedule")
    if len(job.pools) > 1 and schedule in EXECUTED:
        hint = "`planner explain MODEL CLUSTER --layout pp=2,pools=...,schedule=...` prices it"
        raise InputError(f"schedule `{schedule}` is not searched on a mixed cluster", where="--pin", hint=hint)
    most = most_layers_on(len(job.pools))
    if len(job.pools) > 1 and job.model.num_layers > most:
        message = f"{len(job.pools)} pools are planned for models of up to {most} layers, not {job.model.num_layers}"
        raise InputError(message, where=job.cluster.name, hint="join pools that are much alike, or leave one out")
    pinned = constraints.value_of("pools")
    if pinned is None:
        return
    known = [pool.cluster.name for pool in job.pools] if len(job.pools) > 1 else []
    runs = [name for name, _ in groupby(pinned.split("/"))]
    unknown = sorted(set(runs) - set(known))
    if unknown:
        hint = f"pools are {', '.join(known)}" if known else "the cluster is of one kind and has no pools"
        raise InputError(f"unknown pool `{unknown[0]}`", where="--pin", hint=hint)
    if len(set(runs)) < len(runs):
        raise InputError(f"`pools={pinned}`: the stages of one pool are neighbours", where="--pin")


def _check_pins(job: Job, constraints: Constraints) -> None:
    """Refuse pins on values that the engine lacks, because no configuration could meet them."""
    policies = (constraints.value_of("recompute") or "none").split("/")
    asked = [(key, constraints.value_of(key)) for key in ("schedule", "offload")]
    asked += [("recompute", policy) for policy in sorted(set(policies))]
    asked += [(axis, axis) for axis in _AXES if int(constraints.value_of(axis) or 1) > 1]
    asked += [("sp", "1")] if constraints.value_of("sp") == "1" else []  # sp=0 is legal where tp is 1
    found = [mistake for key, value in asked if value and (mistake := _lacking(job, key, value))]
    if len(set(policies)) > 1 and not job.engine.pipeline.recompute_per_stage:
        message = f"engine {job.engine.name} has one recompute policy for all stages"
        found.append(Mistake(message=message, where="--pin", hint="pin one policy, such as recompute=full"))
    if constraints.value_of("mtp") and not job.model.mtp_layers:
        found.append(Mistake(message=f"{job.model.name} has no layers for multi-token prediction", where="--pin"))
    for axis, ban in bans_of(job.engine).items():
        if not constraints.left_of(axis, [1]):
            found.append(Mistake(message=f"engine {job.engine.name}: {ban.words}", where="--pin", hint=ban.way_out))
    if found:
        raise InputError(*found)


def _lacking(job: Job, key: str, value: str) -> Mistake | None:
    """The error for a pinned value that the engine's profile does not list; None if the profile lists the value."""
    offered_by = attrgetter(_OFFERED[key])
    have = offered_by(job.engine)

    def has(engine: EngineSpec) -> bool:
        return engine.can.recomputes(value) if key == "recompute" else value in map(str, offered_by(engine))

    if has(job.engine):
        lacking = [what for part, what in absent_modules(job.model).items() if part in value.split("+")]
        if key != "recompute" or not lacking:
            return None
        message = f"recompute `{value}`: {job.model.name} has no {' and no '.join(lacking)}"
        return Mistake(message=message, where="--pin")
    elsewhere = other_engines("; ", has)
    elsewhere = elsewhere and f"{elsewhere} has `{value}`"
    what, offered = (f"`{key}`", "") if key in _AXES else (f"{key} `{value}`", f"{key}=")
    message = f"engine {job.engine.name} does not have {what}"
    words = job.engine.can.recompute_words if key == "recompute" else any_of(have)
    return Mistake(message=message, where="--pin", hint=f"it has {offered}{words}{elsewhere}")


def _check_lists(job: Job, constraints: Constraints) -> None:
    """Check that the search can choose the pinned lists: they hold all layers, and a stage's chunks are equal."""
    schedule, given = constraints.value_of("schedule"), [key for key in _LISTS if constraints.per_chunk(key)]
    if schedule in EXECUTED and given:
        hint = f"`planner explain MODEL CLUSTER --layout schedule={schedule},...` prices any layers and recompute"
        raise InputError(f"`{given[0]}` is not chosen with schedule {schedule}", where="--pin", hint=hint)
    layers, pp = constraints.per_chunk("layers_per_stage"), constraints.value_of("pp")
    if layers and sum(map(int, layers)) != job.model.num_layers:
        message = f"`layers_per_stage` sums to {sum(map(int, layers))}"
        raise InputError(message, where="--pin", hint=f"the model has {job.model.num_layers} layers")
    for key in given:
        values = constraints.per_chunk(key) or ()
        stages = int(pp or len(values))
        chunks, alike = len(values) // stages, values[:stages]
        wanted = alike * chunks
        if key == "layers_per_stage" and chunks:
            sums = tuple(sum(map(int, values[stage::stages])) for stage in range(stages))
            balanced = balanced_chunks(sums, chunks)
            if (
                chunks > 1 and job.engine.pipeline.places_ends
            ):  # the last chunks before an end of the model may be shorter
                ends = (*balanced[-stages:-2], *map(int, values[-2:]))[-stages:]
                balanced = balanced_chunks(sums, chunks, last=ends)
            wanted = tuple(map(str, balanced))
        if values != wanted:
            hint = "pp * interleave entries; the chunks of one stage are alike, or first ones have one layer more"
            raise InputError(f"`{key}={'/'.join(values)}` cannot be planned", where="--pin", hint=hint)
        if key == "layers_per_stage" and chunks > 1 and pattern_of(job).period > 1 and len(set(values)) > 1:
            message = f"kinds of layers repeat in {job.model.name}: its interleaved chunks are planned of equal size"
            hint = "`planner explain MODEL CLUSTER --layout layers_per_stage=...` prices any"
            raise InputError(message, where="--pin", hint=hint)
