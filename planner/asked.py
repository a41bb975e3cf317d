"""What the keywords of the Python API ask for: the job, and the constraints of its program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, get_args

from planner.cost.segments import with_segment
from planner.emit.plannable import check_plannable, unplannable, whole_hosts
from planner.errors import InputError
from planner.made_by import made_by
from planner.plan_parts import ObjectiveName
from planner.search.given import plan_for_layout, plan_for_text
from planner.search.reporter import Reporter
from planner.search.space.constraints import Constraints
from planner.specs.by_name import load_calibration, model_notes
from planner.specs.load import load_job
from planner.specs.text import any_of, did_you_mean, printable
from planner.units import parse_length

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.plan import Plan
    from planner.specs.job import Job

Texts: TypeAlias = str | Sequence[str]
Nodes: TypeAlias = int | Mapping[str, int]
"""Number of hosts; for a mixed cluster, the number of hosts of each pool by the pool's name."""
Sizes: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]
"""Numbers of hosts to compare; for a mixed cluster, the numbers of hosts of each pool by the pool's name."""


class Workload(TypedDict, total=False):
    """Keywords of every function that plans a model on a cluster; a keyword that is None counts as not given.

    gpus: number of devices, instead of nodes.
    seq_len: tokens of a sequence, a number or "32k".
    global_batch: sequences of a step, "4M tokens", or a range "512..2048" from which `plan_job` chooses.
    precision: the number format in which the model computes.
    engine: the program that will train.
    settings: changes to documents, "device.memory=141GiB".
    failures: count failures and checkpoints in the length of the run.
    risk: the plan has to fit with a chance of 1 - risk.
    headroom: share of the memory to leave free, a plain limit instead of the chance.
    calibration: a file of corrections from your own runs.
    """

    gpus: int | None
    seq_len: int | str | None
    global_batch: int | str | None
    precision: str | None
    engine: str
    settings: Texts
    failures: bool
    risk: float | None
    headroom: float | None
    calibration: str | Path | None
    allow_tp_across_nodes: bool
    allow_offload: bool


def priced(job: Job, layout: str | Layout) -> Plan:
    """The plan of one layout of a job, without a search."""
    if job.batch:
        hint = "give one number of sequences, as in --global-batch 1024; `planner plan` chooses from a range"
        raise InputError("one layout is priced with one batch size", where="global_batch_size", hint=hint)
    if isinstance(layout, str):
        return plan_for_text(job, layout)
    return plan_for_layout(job, with_segment(job.cluster, layout))


def load(
    model: str,
    cluster: str,
    training: str | None,
    reporter: Reporter | None,
    *,
    nodes: Nodes | None,
    seq_len: int | str | None = None,
    global_batch: int | str | None = None,
    settings: Texts = (),
    failures: bool = False,
    calibration: str | Path | None = None,
    **others: Any,
) -> Job:
    """The job of these documents and keywords; the reporter lists the unread parts of an imported model."""
    if isinstance(nodes, str | Sequence):
        hint = "one number, or the hosts of each pool by name; `planner.compare_sizes` compares many"
        raise InputError(f"{nodes!r} is no number of hosts", where="--nodes", hint=hint)
    if others.get("risk") is not None and others.get("headroom") is not None:
        hint = "give the accepted chance, or the share of memory to leave free"
        raise InputError("--risk and --headroom both limit the memory", where="--headroom", hint=hint)
    if isinstance(global_batch, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", global_batch.strip()):
        global_batch = int(global_batch)
    given = {
        "nodes": nodes,
        "sequence_length": _length(seq_len),
        "global_batch_size": global_batch,
        "settings": (*texts(settings), *(("training.failures=true",) if failures else ())),
        "calibration": calibration and Path(calibration),
        **others,
    }
    job = load_job(
        model=model, cluster=cluster, training=training, **{name: v for name, v in given.items() if v is not None}
    )
    notes = model_notes(model) if isinstance(model, str) else ()
    if calibration and made_by(job).calibration == "shipped":
        notes = (*notes, _has_no_corrections(Path(calibration), job))
    for note in notes:
        (reporter or Reporter()).noted(note)
    return job


def _has_no_corrections(path: Path, job: Job) -> str:
    """A note that the user's calibration has no corrections for this job, and for which devices and engines it has."""
    entries = [entry for entry in load_calibration(path).entries if entry.low and entry.device and entry.engine]
    there = ", ".join(f"{entry.device} with engine {entry.engine}" for entry in entries) or "none"
    devices = any_of(sorted({pool.cluster.device.name for pool in job.pools}))
    words = f"{printable(str(path))} has no corrections for {devices} with engine {job.engine.name}"
    return f"{words}, so the shipped ones are used; it has: {there}"


def _length(seq_len: int | str | None) -> int | None:
    try:
        return parse_length(seq_len) if isinstance(seq_len, str) else seq_len
    except ValueError as error:
        raise InputError(str(error), where="--seq-len") from None


def plannable(job: Job, constraints: Constraints) -> Constraints:
    """The user's constraints, and further constraints that exclude layouts that no program of the engine can run.

    Raises:
        InputError: no program of the engine can be configured for the model or the training.
    """
    check_plannable(job)
    pinned = {pin.key for pin in constraints.pins}
    more = Constraints.parse((), unplannable(job, pinned)).forbidden
    forbidden = tuple(dict.fromkeys((*constraints.forbidden, *more)))
    return replace(constraints, forbidden=forbidden, whole_hosts=whole_hosts(job, pinned))


def texts(given: Texts) -> tuple[str, ...]:
    """The texts as a tuple; a single text becomes a tuple of one."""
    return (given,) if isinstance(given, str) else tuple(given)


def check_goal(objective: str, confidence: float) -> None:
    """Refuse a word that is no objective, and a required chance that is none, or certainty."""
    check_choice("--objective", objective, ObjectiveName)
    if not 0 < confidence < 1:
        raise InputError(f"{confidence} is no chance", where="--confidence", hint="valid: above 0% to below 100%")


def check_choice(option: str, given: str, choices: Any) -> None:
    """Refuse a word that is not among the choices, a type of literals."""
    known = get_args(choices)
    if given not in known:
        hint = did_you_mean(given, known, otherwise=f"valid: {any_of(known)}")
        raise InputError(f"{given!r} is none of them", where=option, hint=hint)
