"""The Python API: functions that do the work of the commands and return the results. `planner` exports them.

Each option of the command line is a keyword of the same name, with `_` instead of `-`; `--set` is the keyword
`settings`, because `set` is a builtin. Input that the command line refuses raises a `PlannerError`. Its text gives
each fault, its place and a correction, with the command line's names: `--seq-len` is the keyword `seq_len`.

Modules that only some of the functions need are imported in those functions, because their import takes as long as a
small plan.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack, get_args

from planner import reading
from planner.answers.plan_inputs import constraints_of, job_of, objective_of_plan
from planner.cost.estimate import estimate
from planner.cost.segments import with_segment
from planner.emit.plannable import check_plannable, not_run, unplannable, whole_hosts
from planner.errors import InputError, PlannerError
from planner.made_by import made_by
from planner.plan import Plan, RunnerUp, saved_documents
from planner.plan_parts import CONFIDENCE, WITHIN, ObjectiveName
from planner.search.given import plan_for_layout, plan_for_text
from planner.search.near_ties import runner_up
from planner.search.objectives import LIMITS
from planner.search.reporter import Reporter
from planner.search.space.constraints import Constraints
from planner.shipped import clusters, engine_profiles, models
from planner.specs.by_name import load_calibration, model_notes
from planner.specs.cluster import ClusterSpec
from planner.specs.cluster_documents import (
    check_num_choices,
    checked_cluster,
    cluster_tree,
    folder_of,
    split_size,
    with_devices,
)
from planner.specs.files import is_plan
from planner.specs.load import load_job
from planner.specs.mistakes import Mistakes
from planner.specs.text import any_of, did_you_mean, printable
from planner.units import parse_length
from planner.verdict import undecided

if TYPE_CHECKING:
    from planner.answers.remedies import InTime, LiftedPin, Remedy
    from planner.answers.report import Explanation
    from planner.answers.side_by_side import Choice, SideBySide
    from planner.answers.sweep import Sweep
    from planner.cost.run import Requirement
    from planner.emit.read.front import Foreign
    from planner.evidence.fit import Learnt
    from planner.layout import Layout
    from planner.search.optimum.integer_program import SolverName
    from planner.specs.calibration import Calibration
    from planner.specs.job import Job

__all__ = [
    "Plan",
    "PlannerError",
    "clusters",
    "compare_clusters",
    "compare_sizes",
    "engine_profiles",
    "estimate_layout",
    "explain_layout",
    "models",
    "plan_job",
    "read_plan",
    "shortfall",
]

Texts: TypeAlias = str | Sequence[str]
Files: TypeAlias = str | Path | Sequence[str | Path]
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


class Shortfall:
    """A job for which no layout fits, or none meets deadline and budget, and the searches for what would help.

    asked: the constraints of the user, without the limits of the engine's programs.
    in_time: the objective whose limits are not met; None if the job lacks memory.
    missed: the requirements that are not met.
    """

    job: Job
    asked: Constraints
    in_time: InTime | None = None
    missed: tuple[Requirement, ...] = ()

    def remedies(self, reporter: Reporter | None = None) -> tuple[Remedy, ...]:
        """Changes with which the job fits, or meets its requirements, sorted by tokens per device, most first."""
        from planner.answers.remedies import remedies

        return remedies(self.job, self.asked, reporter, in_time=self.in_time, planned=_plannable)

    def lifted_pins(self, reporter: Reporter | None = None) -> tuple[LiftedPin, ...]:
        """For each pin of the user, the result of a search without this pin."""
        from planner.answers.remedies import each_lifted, lifted_pins

        return lifted_pins(self.job, each_lifted(self.asked), reporter, in_time=self.in_time, planned=_plannable)


def shortfall(found: Plan | Sweep | SideBySide, objective: ObjectiveName = "throughput") -> Shortfall | None:
    """What an answer lacks of what was asked for; None if a plan fits and meets the requirements of the objective.

    `planner plan` exits with 3 and says what would help if its answer has a shortfall. If a job fits on no cluster of a
    comparison, the shortfall is that of the cluster on which it fits most likely.
    """
    lacking = Shortfall()
    if isinstance(found, Plan):
        lacking.job, asked = job_of(found), constraints_of(found)
        missed = found.run.missed if found.fits and found.run else ()
        lacking.missed = tuple(each for each in LIMITS[objective] if each in missed)
        if found.fits and not lacking.missed:
            return None
    from planner.answers.remedies import InTime
    from planner.answers.sweep import Sweep

    if isinstance(found, Plan):
        lacking.in_time = InTime(objective, found.options.confidence or CONFIDENCE) if found.fits else None
    elif isinstance(found, Sweep):
        lacking.job, asked, objective = found.job, found.constraints, found.objective
        runs = [[each for each in LIMITS[objective] if each in found.run(point).missed] for point in found.front]
        if not all(runs):
            return None
        if runs:
            nearest = min(range(len(runs)), key=lambda at: len(runs[at]))
            lacking.missed, lacking.in_time = tuple(runs[nearest]), InTime(objective, found.confidence)
    else:
        lacks = [shortfall(each.plan, found.objective) for each in sorted(found.planned, key=_chance) if each.plan]
        return lacks[-1] if all(lacks) else None
    limits = _plannable(lacking.job, replace(asked, forbidden=())).forbidden
    lacking.asked = replace(asked, forbidden=tuple(each for each in asked.forbidden if each not in limits))
    return lacking


def _chance(choice: Choice) -> tuple[bool, float, float]:
    """How near a choice comes to what was asked for."""
    plan = choice.plan
    chances = [each for each in (plan.deadline_chance, plan.budget_chance) if each is not None] if plan else []
    return choice.fits, min(chances, default=0.0), choice.chance_of_fitting or 0.0


def plan_job(
    model: str,
    cluster: str,
    training: str | None = None,
    *,
    nodes: Nodes | None = None,
    pin: Texts = (),
    forbid: Texts = (),
    objective: ObjectiveName = "throughput",
    within: float = WITHIN,
    confidence: float = CONFIDENCE,
    top: int = 3,
    solver: SolverName | None = None,
    time_limit: float | None = None,
    check: bool = False,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> Plan:
    """Find the best layout of a model on a cluster, as `planner plan` does.

    model, cluster: a shipped name or the path of a file.
    training: the path of a training document.
    pin, forbid: one text or several, as in `pin="tp=8,mbs<=4"`.
    within: share of the objective by which the plan may be worse than the minimum; 0 asks for the minimum itself, which
        `plan.minimum` always has.
    confidence: required chance of meeting the deadline (objectives `cost` and `gpus`) and the budget.
    top: largest number of layouts in `plan.runners_up`, each of another kind.
    solver: of the integer program; by default CBC, or HiGHS where PuLP came without CBC.
    check: compare lower bounds with the optima of 64 configurations that the bounds ruled out.
    reporter: receives messages about the progress of the search.
    workload: gpus, seq_len, global_batch, precision, engine, settings, failures, risk, headroom, calibration,
        allow_tp_across_nodes and allow_offload, as `planner.api.Workload` explains them.

    If no layout meets the deadline, the plan is the fastest layout and `plan.run.meets_deadline` is false; if none
    meets the budget, it is the cheapest layout and `plan.run.meets_budget` is false. If no layout fits, `plan.fits` is
    false: the plan is the layout most likely to fit, or, without a certificate, the layout that comes nearest to it. In
    these cases `shortfall(plan)` searches for what would help.

    Raises:
        InputError: documents or keywords have mistakes (all are listed), or no layout is legal under the pins.
        EnvironmentProblem: a file cannot be read.
    """
    from planner.answers.deadline import search_in_time
    from planner.search.optimum import integer_program, solver_process

    _check_choice("--objective", objective, ObjectiveName)
    _check_choice("--solver", solver := solver or solver_process.default_solver(), integer_program.SolverName)
    _check_confidence(confidence)
    asked = Constraints.parse(_texts(pin), _texts(forbid))
    job = _load(model, cluster, training, reporter, nodes=nodes, **workload)
    constraints = _plannable(job, asked)
    batch = None
    if job.batch:
        from planner.answers.batch_choice import batch_report, choose_batch

        job, tried = choose_batch(job, constraints, objective, reporter, confidence=confidence)
        batch = batch_report(job, tried)
    found = search_in_time(
        job,
        constraints,
        objective,
        confidence=confidence,
        solver=solver,
        time_limit=time_limit,
        top=top,
        within=within,
        check=check,
        reporter=reporter,
    )
    if not isinstance(found, Plan):
        nearest = plan_for_layout(job, found.layout)
        said: Any = {"objective": objective, **asked.to_dict()}
        return replace(nearest, options=replace(nearest.options, **said))
    return replace(found, batch=batch)


def compare_sizes(
    model: str,
    cluster: str,
    training: str | None = None,
    *,
    nodes: Sizes,
    pin: Texts = (),
    forbid: Texts = (),
    objective: ObjectiveName = "throughput",
    confidence: float = CONFIDENCE,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> Sweep:
    """Find the best layout for each of many sizes of a cluster, as `planner plan --nodes A..B` does.

    nodes: the numbers of hosts, as in `range(1, 9)`, or the numbers of hosts of each pool. One pass over all sizes
    finds the same layouts as a search for each size would. The result gives the smallest number of devices for any
    deadline, and the sizes that meet the requirements of the training document with the required confidence.
    `objective` decides which of these requirements have to be met; `memory` is not one of them here, because the
    layouts are the fastest of each size. `plan_job` explains the other keywords.

    Raises:
        InputError: as `plan_job`.
        EnvironmentProblem: a file cannot be read.
    """
    from planner.answers.sweep import sweep, sweep_pools

    _check_choice("--objective", objective, ObjectiveName)
    _check_confidence(confidence)
    constraints = Constraints.parse(_texts(pin), _texts(forbid))
    largest = {pool: max(hosts) for pool, hosts in nodes.items()} if isinstance(nodes, Mapping) else max(nodes)
    job = _load(model, cluster, training, reporter, nodes=largest, **workload)
    constraints = _plannable(job, constraints)
    if any(min(hosts) < 1 for hosts in (nodes.values() if isinstance(nodes, Mapping) else [nodes])):
        raise InputError("a cluster has at least one host", where="--nodes")
    if len(job.pools) == 1:
        assert not isinstance(nodes, Mapping), "a cluster of one kind has no pools"
        return sweep(job.pools[0], constraints, nodes, reporter, confidence=confidence, objective=objective)
    assert isinstance(nodes, Mapping), "a mixed cluster has no one size"
    return sweep_pools(job, constraints, nodes, reporter, confidence=confidence, objective=objective)


def compare_clusters(
    model: str,
    clusters: Sequence[str],
    training: str | None = None,
    *,
    nodes: int | Sequence[int] | None = None,
    pin: Texts = (),
    forbid: Texts = (),
    objective: ObjectiveName = "throughput",
    within: float = WITHIN,
    solver: SolverName | None = None,
    time_limit: float | None = None,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> SideBySide:
    """Find the best layout on each of several clusters, as `planner plan MODEL A,B,C` does.

    clusters: shipped names or paths of files.
    nodes: hosts of each cluster, or several numbers of hosts.

    A cluster on which the job cannot be planned is listed with the reason. `plan_job` explains the other keywords.

    Raises:
        InputError: an unknown cluster, or mistakes of documents and keywords that occur on every cluster.
        EnvironmentProblem: a file cannot be read.
    """
    from planner.answers.side_by_side import side_by_side

    sizes = [nodes] if nodes is None or isinstance(nodes, int) else [*nodes]
    check_num_choices(len(set(clusters)) * len(sizes))
    mistakes = Mistakes()
    given = {"--nodes": nodes, "--gpus": workload.get("gpus")}
    sized = [option for option, size in given.items() if size is not None]
    for name in clusters:
        mistakes.attempt(cluster_tree, name)
        if sized and split_size(name)[1]:
            mistakes.add(f"{sized[0]} and {name} both give the size of the cluster", hint="give one of them")
    mistakes.raise_if_any()
    pairs = [
        (cluster, int(hosts) if hosts else size)
        for cluster, hosts in map(split_size, dict.fromkeys(clusters))
        for size in sizes
    ]
    options: dict[str, Any] = {"pin": pin, "forbid": forbid, "objective": objective, "within": within, "solver": solver}

    def plan_on(name: str, size: int | None) -> Plan:
        (reporter or Reporter()).about(f"planning {name}" + (f" x {size}" if size else ""))
        return plan_job(
            model, name, training, nodes=size, time_limit=time_limit, top=1, reporter=reporter, **options, **workload
        )

    return side_by_side(pairs, plan_on, objective)


def estimate_layout(
    model: str,
    cluster: str,
    training: str | None = None,
    *,
    layout: str | Layout,
    nodes: Nodes | None = None,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> Plan:
    """Price one layout without a search, `layout="tp=8,pp=4,mbs=1"`; `plan.fits` says whether it fits.

    The rules of `planner.search.given` fill missing values; `plan.assumed` lists them.

    `plan_job` explains the other keywords.

    Raises:
        InputError: documents or keywords have mistakes, or the layout breaks rules; all of them are listed.
        EnvironmentProblem: a file cannot be read.
    """
    return _priced(_load(model, cluster, training, reporter, nodes=nodes, **workload), layout)


def _priced(job: Job, layout: str | Layout) -> Plan:
    if job.batch:
        hint = "give one number of sequences, as in --global-batch 1024; `planner plan` chooses from a range"
        raise InputError("one layout is priced with one batch size", where="global_batch_size", hint=hint)
    if isinstance(layout, str):
        return plan_for_text(job, layout)
    return plan_for_layout(job, with_segment(job.cluster, layout))


def estimate_file(
    path: Files,
    cluster: str,
    training: str | None = None,
    *,
    model: str | None = None,
    layout: str = "",
    define: Texts = (),
    args: str | None = None,
    ignore: Texts = (),
    nodes: Nodes | None = None,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> Plan:
    """Price the layout and training that a file of another program sets, as `planner explain --from` does.

    `plan.assumed` lists the values that the file leaves open, and the file's keys that have no price.
    path: a command line or script, YAML, JSON or TOML that `planner.emit.read` knows; or several files of one run.
    model: replaces the model that the file describes.
    layout: values that replace values of the file's layout.
    define: `NAME=VALUE` of variables that a script leaves open.
    args: arguments of the script, as a shell reads them.
    ignore: keys of the file to price it without; `plan.unknown_because` lists keys that decide whether the plan fits
        and have no price.

    `plan_job` explains the other keywords; they override the training and the machines of the file.

    Raises:
        InputError: the file cannot be read, its layout cannot run, or a value is missing that a keyword has to give.
        EnvironmentProblem: a file cannot be read.
    """
    from planner.emit.read.front import layout_text, with_layout

    own = {"model": model, "define": _texts(define), "args": args, "ignore": _texts(ignore)}
    foreign, nodes, workload = _of_file(path, cluster, own, nodes, workload)
    spec: Any = foreign.model
    job = _load(spec, cluster, training, reporter, nodes=nodes, **workload)
    try:
        foreign = with_layout(foreign, layout)
        _check_devices(foreign, job.num_devices)
        plan = _priced(job, layout_text(foreign))
    except InputError as error:
        raise error if layout else error.at("--layout", printable(str(_paths(path)[0]), 1000)) from None
    lacking = tuple(f"{key}>=2" for key in _left_out(foreign))
    options = replace(plan.options, forbidden=lacking)
    return replace(plan, assumed=(*foreign.assumed, *plan.assumed), options=options)


def _check_devices(foreign: Foreign, num_devices: int) -> None:
    """Refuse a file without a degree of data parallelism if its other degrees do not divide the number of devices."""
    said = {key: foreign.layout.get(key, "1") for key in ("tp", "pp", "cp")}
    degrees = {key: int(text) for key, text in said.items() if text.isdecimal()}
    product = math.prod(degrees.values())
    if "dp" not in foreign.layout and 0 < product < num_devices and num_devices % product:
        shown = " * ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)
        hint = "change a degree of the file, or --gpus N"
        raise InputError(f"{shown} = {product} does not divide {num_devices:,} devices", where="--layout", hint=hint)


def plan_file(
    path: Files,
    cluster: str | None = None,
    training: str | None = None,
    *,
    model: str | None = None,
    define: Texts = (),
    args: str | None = None,
    ignore: Texts = (),
    nodes: Nodes | None = None,
    reporter: Reporter | None = None,
    **keywords: Any,
) -> Plan:
    """Find the best layout for the model and training that a file of another program sets: `planner plan --from`.

    The file may also be a plan, whose job is planned again: its documents and the options of its search, unless
    keywords change them, with the engine's profile and the corrections of this version. Only a plan may go without
    `cluster`.

    `estimate_file` and `plan_job` explain the keywords and the errors. Keys without a price that decide whether a plan
    fits are an error, except keys of the layout, which the search chooses.
    """
    from planner.emit.read.front import layout_text

    own = {"model": model, "define": _texts(define), "args": args, "ignore": _texts(ignore)}
    if is_plan(first := _paths(path)[0]):
        if define or args or ignore:
            raise InputError("--define, --args and --ignore are of scripts", where="--from", hint=f"{first} is a plan")
        of_plan: Any = _job_of_plan(first, model, cluster, training, keywords)
        return plan_job(nodes=nodes, reporter=reporter, **of_plan)
    if cluster is None:
        raise InputError("no cluster is given", hint="`planner clusters` lists what is shipped")
    foreign, nodes, keywords = _of_file(path, cluster, own, nodes, keywords)
    if open_keys := [each for each in foreign.assumed if each.settled_by and "--layout" not in each.settled_by]:
        raise undecided(open_keys, printable(str(_paths(path)[0]), 1000))
    for each in foreign.assumed:
        (reporter or Reporter()).noted(str(each))
    if foreign.left_behind:
        left_behind = ", ".join(foreign.left_behind)
        words = f"still yours, not carried over and to be set again in what `planner emit` writes: {left_behind}"
        (reporter or Reporter()).noted(words)
    spec: Any = foreign.model
    keywords["forbid"] = (*_texts(keywords.get("forbid", ())), *_beyond(foreign, keywords, reporter))
    plan = plan_job(spec, cluster, training, nodes=nodes, reporter=reporter, **keywords)
    try:
        plan = replace(plan, own=_beside(plan, foreign))
    except InputError as error:
        why = "; ".join(each.message for each in error.mistakes)
        (reporter or Reporter()).noted(f"the file's own layout, {layout_text(foreign)}, has no price: {why}")
    if used := [f"{key}={degree}" for key in foreign.lacks if (degree := getattr(plan.layout, key)) > 1]:
        words = f"the plan has {', '.join(used)}, which {foreign.program} has no key for"
        (reporter or Reporter()).noted(f"{words}: run what `planner emit` writes")
    return plan


def _beyond(foreign: Foreign, keywords: Mapping[str, Any], reporter: Reporter | None) -> tuple[str, ...]:
    """What the search leaves out because the file's program has no key for it, unless the user pins it."""
    pinned = {
        re.split("[<>=!]", part)[0].strip() for each in _texts(keywords.get("pin", ())) for part in each.split(",")
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


def _beside(plan: Plan, foreign: Foreign) -> RunnerUp:
    """The file's own layout, priced for the plan's job and compared with the plan's layout.

    Raises:
        InputError: the layout cannot run.
    """
    from planner.emit.read.front import layout_text

    job = job_of(plan)
    _check_devices(foreign, job.num_devices)
    own = plan_for_text(job, layout_text(foreign)).layout
    priced = estimate(job, plan.layout), estimate(job, own)
    return runner_up(job, plan.layout, priced[0], own, priced[1], objective_of_plan(plan))


def _job_of_plan(
    path: Path, model: str | None, cluster: str | None, training: str | None, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords of `plan_job` that plan the job of a plan again, with `keywords` in place of its options."""
    own_model, own_cluster, own_training, said = saved_documents(path, "model", "cluster", "training", "options")
    changed = {name: value for name, value in keywords.items() if value is not None}
    if {"risk", "headroom"} & changed.keys():
        said = {name: value for name, value in said.items() if name not in ("risk", "headroom")}
    documents = {"model": model or own_model, "cluster": cluster or own_cluster, "training": training or own_training}
    return {**documents, **said, **changed}


def _paths(path: Files) -> list[Path]:
    return [Path(path)] if isinstance(path, str | Path) else [Path(each) for each in path]


def _of_file(
    path: Files, cluster: str, given: Mapping[str, Any], nodes: Nodes | None, keywords: Any
) -> tuple[Foreign, Nodes | None, Any]:
    """Read the files; return their content, the nodes, and the keywords, completed with the values of the files.

    given: further keywords of `read_foreign`.
    """
    from planner.emit.read.front import read_foreign

    settings, engine = _texts(keywords.get("settings") or ()), keywords.get("engine")
    options = {"sequence_length": keywords.get("seq_len"), "precision": keywords.get("precision")}
    said = (*settings, *(f"training.{name}={value}" for name, value in options.items() if value is not None))
    num_devices = _num_devices(cluster, nodes, keywords.get("gpus"))
    is_sized = nodes is not None or keywords.get("gpus") is not None or split_size(cluster)[1] != ""
    foreign = read_foreign(
        _paths(path),
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
        where = str(_paths(path)[0])
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


def explain_layout(
    plan: Plan,
    *,
    why_not: Texts = (),
    what_if: Texts = (),
    schedules: bool = False,
    collectives: bool = False,
    batch: bool = False,
    scaling: str | None = None,
    parts: Collection[str] | None = None,
    search: bool = True,
    reporter: Reporter | None = None,
) -> Explanation:
    """Break down the costs of a plan's layout and answer questions about it, as `planner explain` does.

    plan: a result of `plan_job`, `estimate_layout` or `read_plan`. `what_if=""` asks for the gain of 10 % more of each
    resource. `parts` names the fields of `Explanation.sections` to compute, beside the answers; without it all are.
    search: whether the answers to `what_if` plan again after the change; without it they are prices of the plan's own
        layout, and no other part is computed unless `parts` names it, so that they take about as long as one price.

    Raises:
        InputError: a question that cannot be read, a plan whose options are not valid, or a question about what fits
            if the plan's verdict is unknown.
        EnvironmentProblem: a file that a question names cannot be read.
    """
    from planner.answers.report import explain

    if plan.fits is None and (why_not or _texts(what_if) or batch or scaling):
        raise undecided(plan.assumed)  # their answers are about what fits
    return explain(
        plan,
        why_not=_texts(why_not),
        what_if=_texts(what_if),
        schedules=schedules,
        collectives=collectives,
        batch=batch,
        scaling=scaling,
        search=search,
        parts=() if parts is None and not search and _texts(what_if) else parts,
        reporter=reporter,
        not_run=not_run(plan),
    )


def calibrate_runs(
    runs: Sequence[str | Path], *, plan: str | Path | None = None
) -> tuple[Calibration, tuple[Learnt, ...], tuple[str, ...]]:
    """Learn corrections from measured runs, as `planner calibrate` does.

    runs: folders of `planner launch`, tables of runs (.csv), and logs of other programs.
    plan: the plan of the logged runs; without it a plan.json in the folder of the logs.

    Returns the shipped calibration with the learnt corrections, the corrections for each device and engine, and notes
    on unused parts of the files.

    Raises:
        InputError: the files hold no runs, or hold mistakes; the error lists all mistakes with file and line.
        EnvironmentProblem: a file cannot be read.
    """
    from planner.evidence.fit import learn_calibration
    from planner.evidence.inputs import read_inputs

    notes: list[str] = []
    found = read_inputs([Path(each) for each in runs], plan=Path(plan) if plan else None, tell=notes.append)
    return (*learn_calibration(found), tuple(notes))


def read_plan(path: str | Path) -> Plan:
    """Read a plan that `planner plan -o` or `Plan.to_json` wrote; warn if another version of the planner priced it.

    Raises:
        InputError: the file is not a plan, the plan's layout breaks rules, or the file was edited.
        EnvironmentProblem: the file cannot be read.
    """
    return reading.read_plan(Path(path), tell=partial(warnings.warn, stacklevel=4))


def _load(
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
        "settings": (*_texts(settings), *(("training.failures=true",) if failures else ())),
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


def _plannable(job: Job, constraints: Constraints) -> Constraints:
    """The user's constraints, and further constraints that exclude layouts that no program of the engine can run.

    Raises:
        InputError: no program of the engine can be configured for the model or the training.
    """
    check_plannable(job)
    pinned = {pin.key for pin in constraints.pins}
    more = Constraints.parse((), unplannable(job, pinned)).forbidden
    forbidden = tuple(dict.fromkeys((*constraints.forbidden, *more)))
    return replace(constraints, forbidden=forbidden, whole_hosts=whole_hosts(job, pinned))


def _texts(given: Texts) -> tuple[str, ...]:
    """The texts as a tuple; a single text becomes a tuple of one."""
    return (given,) if isinstance(given, str) else tuple(given)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"{confidence} is no chance", where="--confidence", hint="valid: above 0% to below 100%")


def _check_choice(option: str, given: str, choices: Any) -> None:
    known = get_args(choices)
    if given not in known:
        hint = did_you_mean(given, known, otherwise=f"valid: {any_of(known)}")
        raise InputError(f"{given!r} is none of them", where=option, hint=hint)
