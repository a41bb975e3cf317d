"""The Python API: functions that do the work of the commands and return the results. `planner` exports them.

Each option of the command line is a keyword of the same name, with `_` instead of `-`; `--set` is the keyword
`settings`, because `set` is a builtin. Input that the command line refuses raises a `PlannerError`. Its text gives
each fault, its place and a correction, with the command line's names: `--seq-len` is the keyword `seq_len`.

Modules that only some of the functions need are imported in those functions, because their import takes as long as a
small plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from planner import reading
from planner.answers.shortfall import shortfall
from planner.asked import Nodes, Sizes, Texts, Workload, check_choice, check_goal, load, plannable, priced, texts
from planner.emit.plannable import not_run
from planner.errors import InputError, PlannerError
from planner.foreign import Files, as_given, beside, beyond, check_priced, job_of_plan, of_file, paths_of
from planner.plan import Plan
from planner.plan_parts import CONFIDENCE, WITHIN, ObjectiveName
from planner.search.given import plan_for_layout
from planner.search.reporter import Reporter
from planner.search.space.constraints import Constraints
from planner.shipped import clusters, engine_profiles, models
from planner.specs.files import is_plan
from planner.verdict import undecided

if TYPE_CHECKING:
    from planner.answers.report import Explanation
    from planner.answers.side_by_side import SideBySide
    from planner.answers.sweep import Sweep
    from planner.evidence.fit import Learnt
    from planner.layout import Layout
    from planner.search.optimum.integer_program import SolverName
    from planner.specs.calibration import Calibration

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

    check_goal(objective, confidence)
    check_choice("--solver", solver := solver or solver_process.default_solver(), integer_program.SolverName)
    asked = Constraints.parse(texts(pin), texts(forbid))
    job = load(model, cluster, training, reporter, nodes=nodes, **workload)
    constraints = plannable(job, asked)
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
    from planner.answers.sweep import sweep_of

    check_goal(objective, confidence)
    constraints = Constraints.parse(texts(pin), texts(forbid))
    largest = {pool: max(hosts) for pool, hosts in nodes.items()} if isinstance(nodes, Mapping) else max(nodes)
    job = load(model, cluster, training, reporter, nodes=largest, **workload)
    return sweep_of(job, plannable(job, constraints), nodes, reporter, confidence=confidence, objective=objective)


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
    from planner.answers.side_by_side import side_by_side, sized_clusters

    pairs = sized_clusters(clusters, nodes, workload.get("gpus"))
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

    The rules of `planner.search.given` fill missing values; `plan.assumed` lists them. `plan_job` explains the
    other keywords.

    Raises:
        InputError: documents or keywords have mistakes, or the layout breaks rules; all of them are listed.
        EnvironmentProblem: a file cannot be read.
    """
    return priced(load(model, cluster, training, reporter, nodes=nodes, **workload), layout)


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
    own = {"model": model, "define": texts(define), "args": args, "ignore": texts(ignore)}
    foreign, nodes, workload = of_file(path, cluster, own, nodes, workload)
    spec: Any = foreign.model
    job = load(spec, cluster, training, reporter, nodes=nodes, **workload)
    return as_given(job, foreign, layout, paths_of(path)[0])


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
    own = {"model": model, "define": texts(define), "args": args, "ignore": texts(ignore)}
    if is_plan(first := paths_of(path)[0]):
        if define or args or ignore:
            raise InputError("--define, --args and --ignore are of scripts", where="--from", hint=f"{first} is a plan")
        of_plan: Any = job_of_plan(first, model, cluster, training, keywords)
        return plan_job(nodes=nodes, reporter=reporter, **of_plan)
    if cluster is None:
        raise InputError("no cluster is given", hint="`planner clusters` lists what is shipped")
    foreign, nodes, keywords = of_file(path, cluster, own, nodes, keywords)
    check_priced(foreign, first, reporter)
    spec: Any = foreign.model
    keywords["forbid"] = (*texts(keywords.get("forbid", ())), *beyond(foreign, keywords, reporter))
    plan = plan_job(spec, cluster, training, nodes=nodes, reporter=reporter, **keywords)
    return beside(plan, foreign, reporter)


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

    if plan.fits is None and (why_not or texts(what_if) or batch or scaling):
        raise undecided(plan.assumed)  # their answers are about what fits
    return explain(
        plan,
        why_not=texts(why_not),
        what_if=texts(what_if),
        schedules=schedules,
        collectives=collectives,
        batch=batch,
        scaling=scaling,
        search=search,
        parts=() if parts is None and not search and texts(what_if) else parts,
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
