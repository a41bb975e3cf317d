"""Check whether a program of an engine can run a plan; an engine's profile may price more than programs can run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from planner.emit.names import names_beside
from planner.emit.programs import PROGRAMS
from planner.emit.target import refusals
from planner.errors import InputError, Mistake
from planner.layout import AXES, Layout, even_split
from planner.specs.banned import searched_axes
from planner.specs.by_name import priced_engine_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from planner.plan import Plan
    from planner.specs.job import Job


def check_plannable(job: Job) -> None:
    """Refuse a search if no program of the engine could run any of its plans.

    A profile prices published runs of any kind, and `planner explain` shows their cost. If an engine's profile names no
    program, everything that it prices can be planned, but the plans cannot be emitted.

    Raises:
        InputError: the profile only prices published runs, or all programs that it names have faults; these are the
            first program's.
    """
    if job.engine.name in priced_engine_names():
        words = f"profile {job.engine.name} only prices published runs, and no plan is made for it"
        hint = "`planner engines` lists the programs to plan for, and `planner explain --layout` prices this one's runs"
        raise InputError(words, where=f"--engine {job.engine.name}", hint=hint)
    faults = [_faults(job, PROGRAMS[name]) for name in job.engine.emits if name in PROGRAMS]
    if faults and all(faults):
        where = f"--engine {job.engine.name}"
        hint = "`planner explain --layout` prices it all the same"
        raise InputError(*(Mistake(message=text, where=where, hint=f"{way}; {hint}") for text, way in faults[0]))


_PROBES: Final[dict[str, list[dict[str, Any]]]] = names_beside(__file__)
"""Text of `--forbid` -> test layouts; the text is forbidden if all programs refuse all of its test layouts."""
_SPLITS: Final = {"tp", "pp", "cp", "ep", "hsdp"}


def unplannable(job: Job, pinned: Collection[str]) -> tuple[str, ...]:
    """Configurations, in the syntax of `--forbid`, that a search must leave out because no program can run them.

    pinned: keys of the user's pins; pinned values are priced even if no program can run them.
    """
    targets = [PROGRAMS[name] for name in job.engine.emits if name in PROGRAMS]
    axes = searched_axes(job.engine) | ({"hsdp"} if job.engine.can.replicates_shards else set())
    axes -= {"ep"} if job.model.moe is None else set()
    found: list[str] = []
    for text, probes in _PROBES.items():
        parts = text.split(",")
        known = any(set(each.split(",")) < set(parts) for each in found)
        says_all = {part.partition("=")[0].rstrip("<>") for part in parts} <= {*pinned}
        if known or says_all or not _is_open(job, probes[0], axes):
            continue
        if targets and all(_faults(job, each, **more) for each in targets for more in probes):
            found.append(text)
    return tuple(found)


def _is_open(job: Job, probe: Mapping[str, Any], axes: Collection[str]) -> bool:
    """Whether a search could reach a test layout, because the engine supports it."""
    if not {*probe} & _SPLITS <= {*axes}:
        return False
    if probe.get("zero") not in (None, *job.engine.pipeline.zero_stages):
        return False
    return probe.get("offload", "none") in ("none", job.engine.offload.with_pipeline)


def not_run(plan: Plan) -> str:
    """A sentence on why no program of a plan's engine runs its layout; empty if one does, or the engine names none."""
    faults = [refusals(PROGRAMS[name], plan) for name in plan.engine.emits]
    why = "; ".join(map("; ".join, faults[0])) if faults and all(faults) else ""
    return why and f"no emitted program runs this: {why}"


def whole_hosts(job: Job, pinned: Collection[str]) -> int:
    """Number of devices per host if no program of the engine can leave a host partly idle, else 0.

    The result is also 0 if degrees are pinned, and for several pools, because programs refuse hosts that differ.
    """
    targets = [PROGRAMS[name] for name in job.engine.emits if name in PROGRAMS]
    if len(job.cluster.pools) > 1 or {*AXES} & {*pinned}:
        return 0
    size = job.cluster.pools[0].devices_per_host
    able = [each for each in targets if not _faults(job, each, dp=size)]
    return size if able and all(_faults(job, each, dp=size + 1) for each in able) else 0


def _faults(job: Job, target: Any, **more: Any) -> list[tuple[str, str]]:
    """Faults that a program reports for the smallest layout with the degrees `more`, for this model and training.

    Without a stage of ZeRO in `more`, ZeRO-1 is tried, and ZeRO-0 if ZeRO-1 has faults.
    """
    stages = 2 if "pp" in more else 1
    zeros = (job.engine.pipeline if "pp" in more else job.engine.can).zero_stages
    layout = Layout(
        recompute=("none",) * stages,
        layers_per_stage=even_split(job.model.num_layers, stages, 1),
        **{"zero": 1 if 1 in zeros else max(zeros, default=0), **more},
    )
    given = {each: getattr(job, each) for each in ("model", "training", "engine", "cluster")}
    probe: Any = SimpleNamespace(**given, layout=layout)
    faults = [fault for each in target.refuse if (fault := each.fault(probe))]
    return [] if faults and "zero" not in more and 0 in zeros and not _faults(job, target, **more, zero=0) else faults
