"""Jobs that a file of another program, or a plan, sets: what the file says, and what the user's keywords change."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from planner.answers.plan_inputs import job_of
from planner.asked import priced, texts
from planner.cost.estimate import estimate
from planner.errors import InputError
from planner.plan_file import saved_documents
from planner.search.given import plan_for_text
from planner.search.near_ties import runner_up
from planner.search.objectives import objective_of
from planner.search.reporter import Reporter
from planner.specs.cluster import ClusterSpec
from planner.specs.cluster_documents import checked_cluster, cluster_tree, folder_of, split_size, with_devices
from planner.specs.text import printable
from planner.verdict import undecided

if TYPE_CHECKING:
    from planner.asked import Nodes
    from planner.emit.read.front import Foreign
    from planner.plan import Plan
    from planner.specs.job import Job

Files: TypeAlias = str | Path | Sequence[str | Path]


def _check_devices(foreign: Foreign, num_devices: int) -> None:
    """Refuse a file without a degree of data parallelism if its other degrees do not divide the number of devices."""
    said = {key: foreign.layout.get(key, "1") for key in ("tp", "pp", "cp")}
    degrees = {key: int(text) for key, text in said.items() if text.isdecimal()}
    product = math.prod(degrees.values())
    if "dp" not in foreign.layout and 0 < product < num_devices and num_devices % product:
        shown = " * ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)
        hint = "change a degree of the file, or --gpus N"
        raise InputError(f"{shown} = {product} does not divide {num_devices:,} devices", where="--layout", hint=hint)


def as_given(job: Job, foreign: Foreign, layout: str, path: Path) -> Plan:
    """The file's own layout, priced for a job.

    layout: values that replace values of the file's layout.

    Raises:
        InputError: the layout cannot run.
    """
    from planner.emit.read.front import layout_text, with_layout

    try:
        foreign = with_layout(foreign, layout)
        _check_devices(foreign, job.num_devices)
        plan = priced(job, layout_text(foreign))
    except InputError as error:
        raise error if layout else error.at("--layout", printable(str(path), 1000)) from None
    options = replace(plan.options, forbidden=tuple(f"{key}>=2" for key in _left_out(foreign)))
    return replace(plan, assumed=(*foreign.assumed, *plan.assumed), options=options)


def beyond(foreign: Foreign, keywords: Mapping[str, Any], reporter: Reporter | None) -> tuple[str, ...]:
    """What the search leaves out because the file's program has no key for it, unless the user pins it."""
    pinned = {
        re.split("[<>=!]", part)[0].strip() for each in texts(keywords.get("pin", ())) for part in each.split(",")
    }
    left_out = [key for key in _left_out(foreign) if key not in pinned]
    if left_out:
        words = f"{foreign.program} has no key for {', '.join(left_out)}, which the search leaves out"
        adapters = any(each.startswith("training.lora_rank=") for each in foreign.settings)
        offered = [key for key in left_out if not adapters or key == "cp"]  # no emitted program trains them otherwise
        pins = f"; --pin {offered[0]}=N plans it for the programs of `planner emit`" if offered else ""
        (reporter or Reporter()).noted(f"{words}{pins}")
    return tuple(f"{key}>=2" for key in left_out)


def _left_out(foreign: Foreign) -> list[str]:
    """Degrees that the file's program has no key for, and that are 1 in the file."""
    return [key for key in foreign.lacks if foreign.layout.get(key, "1") == "1"]


def check_priced(foreign: Foreign, path: Path, reporter: Reporter | None) -> None:
    """Note the values that a file leaves open, and its keys that are not carried over.

    Raises:
        InputError: a key decides whether a plan fits and has no price, except keys of the layout.
    """
    if open_keys := [each for each in foreign.assumed if each.settled_by and "--layout" not in each.settled_by]:
        raise undecided(open_keys, printable(str(path), 1000))
    for each in foreign.assumed:
        (reporter or Reporter()).noted(str(each))
    if foreign.left_behind:
        left_behind = ", ".join(foreign.left_behind)
        words = f"still yours, not carried over and to be set again in what `planner emit` writes: {left_behind}"
        (reporter or Reporter()).noted(words)


def beside(plan: Plan, foreign: Foreign, reporter: Reporter | None) -> Plan:
    """The plan with the file's own layout beside its own, if that has a price for the plan's job."""
    from planner.emit.read.front import layout_text

    job, order = job_of(plan), plan.options.objective
    try:
        _check_devices(foreign, job.num_devices)
        own = plan_for_text(job, layout_text(foreign)).layout
        mine, theirs, objective = estimate(job, plan.layout), estimate(job, own), objective_of(job, order)
        plan = replace(plan, own=runner_up(job, plan.layout, mine, own, theirs, objective))
    except InputError as error:
        why = "; ".join(each.message for each in error.mistakes)
        (reporter or Reporter()).noted(f"the file's own layout, {layout_text(foreign)}, has no price: {why}")
    if used := [f"{key}={degree}" for key in foreign.lacks if (degree := getattr(plan.layout, key)) > 1]:
        words = f"the plan has {', '.join(used)}, which {foreign.program} has no key for"
        (reporter or Reporter()).noted(f"{words}: run what `planner emit` writes")
    return plan


def job_of_plan(
    path: Path, model: str | None, cluster: str | None, training: str | None, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords of `plan_job` that plan the job of a plan again, with `keywords` in place of its options."""
    own_model, own_cluster, own_training, said = saved_documents(path, "model", "cluster", "training", "options")
    changed = {name: value for name, value in keywords.items() if value is not None}
    if {"risk", "headroom"} & changed.keys():
        said = {name: value for name, value in said.items() if name not in ("risk", "headroom")}
    documents = {"model": model or own_model, "cluster": cluster or own_cluster, "training": training or own_training}
    return {**documents, **said, **changed}


def paths_of(path: Files) -> list[Path]:
    """The files of one run, of which there may be only one."""
    return [Path(path)] if isinstance(path, str | Path) else [Path(each) for each in path]


def of_file(
    path: Files, cluster: str, given: Mapping[str, Any], nodes: Nodes | None, keywords: Any
) -> tuple[Foreign, Nodes | None, Any]:
    """Read the files; return their content, the nodes, and the keywords, completed with the values of the files.

    given: further keywords of `read_foreign`.
    """
    from planner.emit.read.front import read_foreign

    settings, engine = texts(keywords.get("settings") or ()), keywords.get("engine")
    options = {"sequence_length": keywords.get("seq_len"), "precision": keywords.get("precision")}
    said = (*settings, *(f"training.{name}={value}" for name, value in options.items() if value is not None))
    num_devices = _num_devices(cluster, nodes, keywords.get("gpus"))
    is_sized = nodes is not None or keywords.get("gpus") is not None or split_size(cluster)[1] != ""
    foreign = read_foreign(
        paths_of(path),
        settings=said,
        engine=engine,
        num_devices=num_devices,
        per_host=_num_devices(cluster, 1, None),
        is_sized=is_sized,
        **given,
    )
    filled = {**keywords, "engine": foreign.engine, "settings": (*foreign.settings, *settings)}
    says_batch = any(each.startswith("training.global_batch_size=") for each in filled["settings"])
    if not says_batch and filled.get("global_batch") is None:
        where = str(paths_of(path)[0])
        raise InputError("the file does not say the global batch", where=where, hint="--global-batch N says it")
    if not is_sized and foreign.num_devices:
        filled["gpus"] = foreign.num_devices
    elif not is_sized and foreign.num_hosts:
        nodes = foreign.num_hosts
    return foreign, nodes, filled


def _num_devices(cluster: str, nodes: Nodes | None, gpus: int | None) -> int:
    """Number of devices of the job, from its cluster and options; 0 for a mixed cluster.

    Raises:
        InputError: mistakes in the document of the cluster.
        EnvironmentProblem: the file of the cluster cannot be read.
    """
    if gpus is not None:
        return gpus
    found = checked_cluster(with_devices(cluster_tree(cluster), folder_of(cluster)), None)
    if not isinstance(found, ClusterSpec):
        return 0
    return found.devices_per_host * (nodes if isinstance(nodes, int) else found.hosts)
