"""The Python API: what the commands do, as functions that return what they find. `planner` exports it.

Options of the command line are keywords of the same name, with `_` for `-`; `--set` is `settings`, because `set` is a
builtin. Whatever the command line refuses raises a `PlannerError`, whose `mistakes` say what, where and how to mend it;
they name the options of the command line.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, Unpack, get_args

from planner import reading
from planner.accuracy.learn import learn_calibration
from planner.calibrate.inputs import read_inputs
from planner.cost.segments import with_segment
from planner.emit.plannable import check_plannable, lacks_sequence_parallelism, unplannable, whole_hosts
from planner.emit.read.front import layout_text, read_foreign, with_layout
from planner.errors import InputError, NothingFitsError, PlannerError
from planner.explain.report import Explanation, Questions, explain
from planner.fit import fit_words
from planner.plan import Plan
from planner.plan_parts import ObjectiveName
from planner.search.batch_choice import batch_report, choose_batch
from planner.search.deadline import CONFIDENCE, search_in_time
from planner.search.footprint import NothingFits
from planner.search.given import plan_for_text
from planner.search.optimum.integer_program import SolverName
from planner.search.remedies import LiftedPin, Remedy, lifted_pins, remedies
from planner.search.reporter import Reporter
from planner.search.search import plan_for_layout
from planner.search.side_by_side import SideBySide, side_by_side
from planner.search.simplest import WITHIN
from planner.search.space.constraints import Constraints
from planner.search.sweep import Sweep, sweep, sweep_pools
from planner.shipped import clusters, engine_profiles, models
from planner.specs.by_name import model_notes
from planner.specs.cluster import ClusterSpec
from planner.specs.cluster_documents import checked_cluster, cluster_tree, folder_of, with_devices
from planner.specs.load import load_job
from planner.specs.mistakes import Mistakes
from planner.specs.text import any_of, did_you_mean
from planner.units import parse_length

if TYPE_CHECKING:
    from planner.accuracy.learn import Learnt
    from planner.emit.read.front import Foreign
    from planner.layout import Layout
    from planner.specs.calibration import Calibration
    from planner.specs.job import Job

__all__ = [
    "NoLayoutFits",
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
]

_MOST_CHOICES: Final = 64
"""Each takes a search of its own."""

Texts: TypeAlias = str | Sequence[str]
Nodes: TypeAlias = int | Mapping[str, int]
"""Hosts, or those of each pool of a mixed cluster by its name."""
Sizes: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]
"""Numbers of hosts to compare, or those of each pool by its name."""


class Workload(TypedDict, total=False):
    """Keywords of every function that takes a model and a cluster; None is as good as left out.

    gpus: devices, in place of nodes. seq_len: tokens of a sequence, a number or "32k". global_batch: sequences of a
    step, "4M tokens", or a range "512..2048" that `plan_job` chooses from. precision: what the model computes in.
    engine: the program that will train. settings: changes of documents, "device.memory=141GiB". failures: count
    failures and checkpoints in the length of the run. risk: the plan is to fit with a chance of 1 - risk. headroom:
    share of the memory to leave free, a plain limit in place of the chance. calibration: a file of corrections from
    your own runs.
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


class NoLayoutFits(NothingFitsError):
    """No layout of a job fits into memory.

    found: the layout that comes nearest to it, its memory, and its largest line.
    """

    job: Job
    constraints: Constraints
    found: NothingFits

    @property
    def nearest(self) -> Plan:
        """The layout that comes nearest, priced."""
        return plan_for_layout(self.job, self.found.layout)

    def remedies(self, reporter: Reporter | None = None) -> tuple[Remedy, ...]:
        """Single changes with which the job fits, each found by a search, those of most tokens per device first."""
        return remedies(self.job, self.constraints, reporter)

    def lifted_pins(self, reporter: Reporter | None = None) -> tuple[LiftedPin, ...]:
        """What would be possible without each of the pins, each found by a search."""
        return lifted_pins(self.job, self.constraints, reporter)


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
    solver: SolverName = "cbc",
    time_limit: float | None = None,
    check: bool = False,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> Plan:
    """Find the best layout of a model on a cluster, as `planner plan` does.

    model, cluster: a shipped name or the path of a file. training: the path of a training document. pin, forbid: one
    text or several, as in `pin="tp=8,mbs<=4"`. Where no layout meets the deadline the plan is the fastest one, and
    `plan.run.meets_deadline` is false. Where none fits and some may, the plan is the likeliest one, and `plan.fits` is
    false. within: share of the objective that a simpler layout may cost; 0 asks for the minimum, which `plan.minimum`
    has in any case. confidence: chance with which objectives `cost` and `gpus` keep to the deadline. top: most layouts
    in `plan.runners_up`, each of another kind. check: compare lower bounds with the optima of 64 configurations that
    they ruled out. reporter: told what the search does. workload: gpus, seq_len, global_batch, precision, engine,
    settings, failures, risk, headroom, calibration, allow_tp_across_nodes and allow_offload, as `planner.api.Workload`
    explains them.

    Raises:
        NoLayoutFits: no layout fits into memory; it has the nearest one, and finds what would fit.
        InputError: all mistakes of documents and keywords, or no legal layout under the pins.
        EnvironmentProblem: a file cannot be read.
    """
    _check_choice("--objective", objective, ObjectiveName)
    _check_choice("--solver", solver, SolverName)
    _check_confidence(confidence)
    constraints = Constraints.parse(_texts(pin), _texts(forbid))
    job = _load(model, cluster, training, reporter, nodes=nodes, **workload)
    constraints = _plannable(job, constraints)
    batch = None
    if job.batch:
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
    if isinstance(found, NothingFits):
        raise _no_layout_fits(job, constraints, found)
    return replace(found, batch=batch)


def compare_sizes(
    model: str,
    cluster: str,
    training: str | None = None,
    *,
    nodes: Sizes,
    pin: Texts = (),
    forbid: Texts = (),
    confidence: float = CONFIDENCE,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> Sweep:
    """Find the best layout for each of many sizes of a cluster, as `planner plan --nodes A..B` does.

    nodes: the numbers of hosts, `range(1, 9)`, or those of each pool. One pass finds what a search for each size would
    find; the result says for any deadline how few devices are enough, and which keep to that of the training document
    with the confidence. Other keywords are those of `plan_job`.

    Raises:
        InputError: as `plan_job`.
        EnvironmentProblem: a file cannot be read.
    """
    _check_confidence(confidence)
    constraints = Constraints.parse(_texts(pin), _texts(forbid))
    largest = {pool: max(hosts) for pool, hosts in nodes.items()} if isinstance(nodes, Mapping) else max(nodes)
    job = _load(model, cluster, training, reporter, nodes=largest, **workload)
    constraints = _plannable(job, constraints)
    if any(min(hosts) < 1 for hosts in (nodes.values() if isinstance(nodes, Mapping) else [nodes])):
        raise InputError("a cluster has at least one host", where="--nodes")
    if len(job.pools) == 1:
        assert not isinstance(nodes, Mapping), "a cluster of one kind has no pools"
        return sweep(job.pools[0], constraints, nodes, reporter, confidence=confidence)
    assert isinstance(nodes, Mapping), "a mixed cluster has no one size"
    return sweep_pools(job, constraints, nodes, reporter, confidence=confidence)


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
    solver: SolverName = "cbc",
    time_limit: float | None = None,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> SideBySide:
    """Find the best layout on each of several clusters, as `planner plan MODEL A,B,C` does.

    clusters: shipped names or paths of files. nodes: hosts of each cluster, or several numbers of hosts. A cluster on
    which the job cannot be planned is a choice with its reason. Other keywords are those of `plan_job`.

    Raises:
        NothingFitsError: the job fits on none of them.
        InputError: an unknown cluster, or mistakes of documents and keywords that are there for each cluster.
        EnvironmentProblem: a file cannot be read.
    """
    mistakes = Mistakes()
    for name in clusters:
        mistakes.attempt(cluster_tree, name)
    sizes = [nodes] if nodes is None or isinstance(nodes, int) else [*nodes]
    pairs = [(name, size) for name in dict.fromkeys(clusters) for size in sizes]
    if not 1 <= len(pairs) <= _MOST_CHOICES:
        hint = "name fewer clusters, or a smaller range of --nodes"
        mistakes.add(f"{len(pairs)} clusters and sizes are not 1 to {_MOST_CHOICES}", hint=hint)
    mistakes.raise_if_any()
    options: dict[str, Any] = {"pin": pin, "forbid": forbid, "objective": objective, "within": within, "solver": solver}

    def plan_on(name: str, size: int | None) -> Plan:
        (reporter or Reporter()).about(f"planning {name}" + (f" x {size}" if size else ""))
        return plan_job(
            model, name, training, nodes=size, time_limit=time_limit, top=1, reporter=reporter, **options, **workload
        )

    return side_by_side(pairs, plan_on)


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

    What a text leaves out is filled by the rules of `planner.search.given`; `plan.assumed` lists it.

    Other keywords are those of `plan_job`.

    Raises:
        InputError: all mistakes of documents and keywords, or the rules that the layout breaks.
        EnvironmentProblem: a file cannot be read.
    """
    job = _load(model, cluster, training, reporter, nodes=nodes, **workload)
    if job.batch:
        hint = "give one number of sequences, as in --global-batch 1024; `planner plan` chooses from a range"
        raise InputError("one layout is priced with one batch size", where="global_batch_size", hint=hint)
    if isinstance(layout, str):
        return plan_for_text(job, layout)
    return plan_for_layout(job, with_segment(job.cluster, layout))


def estimate_file(
    path: str | Path,
    cluster: str,
    training: str | None = None,
    *,
    model: str | None = None,
    layout: str = "",
    define: Texts = (),
    nodes: Nodes | None = None,
    reporter: Reporter | None = None,
    **workload: Unpack[Workload],
) -> Plan:
    """Price what a file of another program sets, as `planner explain --from` does.

    `plan.assumed` lists what the file leaves open, and keys of it that have no price.
    path: a command line or script, YAML, JSON or TOML that `planner.emit.read` knows. model: in place of the one that
    the file describes. layout: parts that take the place of the file's. define: `NAME=VALUE` of variables that a script
    leaves open. What the file says of training and machines is overridden by the other keywords, those of `plan_job`.

    Raises:
        InputError: what the file says cannot be read or cannot run, or something has to be said beside it.
        EnvironmentProblem: a file cannot be read.
    """
    foreign, nodes, workload = _of_file(path, cluster, model, define, nodes, workload)
    foreign = with_layout(foreign, layout)
    spec: Any = foreign.model
    plan = estimate_layout(
        spec, cluster, training, layout=layout_text(foreign), nodes=nodes, reporter=reporter, **workload
    )
    return replace(plan, assumed=(*plan.assumed, *foreign.assumed))


def plan_file(
    path: str | Path,
    cluster: str,
    training: str | None = None,
    *,
    model: str | None = None,
    define: Texts = (),
    nodes: Nodes | None = None,
    reporter: Reporter | None = None,
    **keywords: Any,
) -> Plan:
    """Find the best layout for the model and training that a file of another program sets: `planner plan --from`.

    Keywords are those of `estimate_file` and `plan_job`; it raises what they raise.
    """
    foreign, nodes, keywords = _of_file(path, cluster, model, define, nodes, keywords)
    (reporter or Reporter()).noted(f"the file's own layout: {layout_text(foreign)}")
    for each in foreign.assumed:
        (reporter or Reporter()).noted(str(each))
    if foreign.left_behind:
        left_behind = ", ".join(foreign.left_behind)
        words = f"not carried over, set again in what `planner emit` writes: {left_behind}"
        (reporter or Reporter()).noted(words)
    spec: Any = foreign.model
    return plan_job(spec, cluster, training, nodes=nodes, reporter=reporter, **keywords)


def _of_file(
    path: str | Path, cluster: str, model: str | None, define: Texts, nodes: Nodes | None, keywords: Any
) -> tuple[Foreign, Nodes | None, Any]:
    """What a file says, and the keywords with it where they leave something open."""
    settings, engine = _texts(keywords.get("settings") or ()), keywords.get("engine")
    own = Path(path)
    num_devices = _num_devices(cluster, nodes, keywords.get("gpus"))
    foreign = read_foreign(
        own, model=model, define=_texts(define), settings=settings, engine=engine, num_devices=num_devices
    )
    filled = {**keywords, "engine": foreign.engine, "settings": (*foreign.settings, *settings)}
    says_batch = any(each.startswith("training.global_batch_size=") for each in filled["settings"])
    if not says_batch and filled.get("global_batch") is None:
        raise InputError("the file does not say the global batch", where=str(path), hint="--global-batch N says it")
    if nodes is None and filled.get("gpus") is None and foreign.num_devices:
        filled["gpus"] = foreign.num_devices
    return foreign, nodes, filled


def _num_devices(cluster: str, nodes: Nodes | None, gpus: int | None) -> int:
    """Devices of the job by its cluster and options; 0 for a mixed cluster.

    Raises:
        InputError: mistakes in the document of the cluster.
        EnvironmentProblem: its file cannot be read.
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
    reporter: Reporter | None = None,
) -> Explanation:
    """Take the layout of a plan apart and answer questions about it, as `planner explain` does.

    plan: of `plan_job`, `estimate_layout` or `read_plan`. `what_if=""` asks for the gain of 10 % more of everything.

    Raises:
        InputError: a question that cannot be read, or a plan whose options are not valid.
        EnvironmentProblem: a file that a question names cannot be read.
    """
    reporter = reporter or Reporter()
    asked = Questions(
        why_not=_texts(why_not),
        what_if=_texts(what_if),
        schedules=schedules,
        collectives=collectives,
        batch=batch,
        scaling=scaling,
    )
    return explain(plan, asked, reporter=reporter, tell=reporter.about)


def calibrate_runs(
    runs: Sequence[str | Path], *, plan: str | Path | None = None
) -> tuple[Calibration, tuple[Learnt, ...], tuple[str, ...]]:
    """Learn corrections from measured runs, as `planner calibrate` does.

    runs: folders of `planner launch`, tables of runs (.csv), and logs of other programs. plan: what the logs ran, where
    no plan.json lies beside them. Returns the shipped calibration with what the runs add, what was learnt for each
    device and engine, and what was left out of the files, in words.

    Raises:
        InputError: files that hold no runs, all mistakes with file and line.
        EnvironmentProblem: a file cannot be read.
    """
    notes: list[str] = []
    found = read_inputs([Path(each) for each in runs], plan=Path(plan) if plan else None, tell=notes.append)
    return (*learn_calibration(found), tuple(notes))


def read_plan(path: str | Path) -> Plan:
    """Read a plan that `planner plan -o` or `Plan.to_json` wrote; a warning says where another version priced it.

    Raises:
        InputError: the file is not a plan, its layout breaks rules, or it was edited.
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
    """The job of these documents and keywords; the reporter is told what was left out of an imported model."""
    if isinstance(nodes, str | Sequence):
        hint = "one number, or the hosts of each pool by name; `planner.compare_sizes` compares many"
        raise InputError(f"{nodes!r} is no number of hosts", where="--nodes", hint=hint)
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
    for note in model_notes(model) if isinstance(model, str) else ():
        (reporter or Reporter()).noted(note)
    return job


def _length(seq_len: int | str | None) -> int | None:
    try:
        return parse_length(seq_len) if isinstance(seq_len, str) else seq_len
    except ValueError as error:
        raise InputError(str(error), where="--seq-len") from None


def _plannable(job: Job, constraints: Constraints) -> Constraints:
    """The constraints of the user, and what no program of the engine could be told.

    Raises:
        InputError: no program can be told the model or the training.
    """
    check_plannable(job)
    pinned = {pin.key for pin in constraints.pins}
    if "sp" not in pinned and lacks_sequence_parallelism(job):  # the search has it wherever it can be
        constraints = replace(constraints, pins=(*constraints.pins, *Constraints.parse(("sp=0",)).pins))
    more = Constraints.parse((), unplannable(job, pinned)).forbidden
    forbidden = tuple(dict.fromkeys((*constraints.forbidden, *more)))
    return replace(constraints, forbidden=forbidden, whole_hosts=whole_hosts(job, pinned))


def _texts(given: Texts) -> tuple[str, ...]:
    """One text is as good as a list of one."""
    return (given,) if isinstance(given, str) else tuple(given)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"{confidence} is no chance", where="--confidence", hint="valid: above 0% to below 100%")


def _check_choice(option: str, given: str, choices: Any) -> None:
    known = get_args(choices)
    if given not in known:
        hint = did_you_mean(given, known, otherwise=f"valid: {any_of(known)}")
        raise InputError(f"{given!r} is none of them", where=option, hint=hint)


def _no_layout_fits(job: Job, constraints: Constraints, found: NothingFits) -> NoLayoutFits:
    words = fit_words(plan_for_layout(job, found.layout))
    error = NoLayoutFits(
        f"no layout fits into memory: of the nearest, {words}", hint="`remedies()` finds what would fit"
    )
    error.job, error.constraints, error.found = job, constraints, found
    return error
