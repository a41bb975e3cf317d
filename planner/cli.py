"""The command line: parse, call one function, print, return an exit code.

Results go to standard output, everything else to standard error. Heavy imports stand inside the commands, so
that `planner --help` answers at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from planner import __version__
from planner.errors import EnvironmentProblem, ExitCode, InputError, PlannerError
from planner.options import (
    file_option,
    json_option,
    nodes_option,
    place_options,
    plan_argument,
    question_options,
    report_options,
    run_options,
    workload_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from planner.explain.report import Explanation
    from planner.plan import Plan
    from planner.search.constraints import Constraints
    from planner.search.footprint import NothingFits
    from planner.search.integer_program import SolverName
    from planner.search.objectives import ObjectiveName
    from planner.specs.job import AnyJob

__all__ = ["cli", "main", "run"]

_OBJECTS_BETWEEN_COLLECTIONS: Final = 100_000


class _Terminated(BaseException):
    """SIGTERM arrived; raised in the main thread so that every `finally` runs."""


class _InOrder(click.Group):
    """Lists the commands in the order of their use, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's own signature
        return list(self.commands)


# --- commands ---------------------------------------------------------------------------------------------------


@click.group(cls=_InOrder, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="planner")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Plan, explain and run the distributed training of transformer models."""
    if ctx.invoked_subcommand is None:
        _print(ctx.get_help() + "\n")


@cli.command()
@click.argument("model")
@click.argument("cluster")
@click.argument("training", required=False, metavar="[TRAINING.yaml]")
@nodes_option(ranges=True)
@workload_options
@click.option("--pin", "pins", multiple=True, metavar="LAYOUT", help="Keep to this, as in tp=8 or mbs<=4.")
@click.option("--forbid", "forbids", multiple=True, metavar="LAYOUT", help="Leave this combination out.")
@click.option(
    "--objective",
    type=click.Choice(["throughput", "cost", "gpus", "memory"]),
    default="throughput",
    show_default=True,
    help="What to be best at; cost and gpus keep to the deadline.",
)
@click.option("--top", type=click.IntRange(1, 100), default=3, show_default=True, metavar="K", help="Layouts to list.")
@click.option("--solver", type=click.Choice(["cbc", "highs"]), default="cbc", show_default=True, help="Integer solver.")
@click.option("--time-limit", type=click.FloatRange(0, min_open=True), metavar="S", help="Seconds for the solver.")
@file_option("-o", "--output", help="Write the plan here.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@file_option("--stats", help="Write how the solve went and how long it took.")
@json_option
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    *,
    pins: Sequence[str],
    forbids: Sequence[str],
    objective: ObjectiveName,
    top: int,
    solver: SolverName,
    time_limit: float | None,
    output: Path | None,
    force: bool,
    stats: Path | None,
    as_json: bool,
    nodes: int | range | dict[str, range] | None,
    **workload: Any,
) -> int:
    """Find the fastest layout for MODEL on CLUSTER.

    MODEL and CLUSTER are shipped names (`planner models`, `planner clusters`) or YAML files; MODEL may be a
    Hugging Face config.json or its folder too. Without -o nothing is written. The exit code is 3 when no layout
    fits into memory, or none meets the deadline.
    """
    from planner.plan import plan_to_json, write_plan
    from planner.search.batch import batch_report, choose_batch
    from planner.search.near_ties import AS_GOOD
    from planner.search.objectives import objective_of
    from planner.search.search import Constraints, NothingFits, search
    from planner.show.progress import Progress, write_stats

    _check_writable(output, stats, force=force)
    constraints = Constraints.parse(pins, forbids)
    if isinstance(nodes, range) or (nodes and not isinstance(nodes, int) and max(map(len, nodes.values())) > 1):
        _refuse_options(ctx, _OF_ONE_SIZE, "is of one size; --nodes A..B shows what is best at each objective")
        return _sweep(nodes, constraints, as_json=as_json, **workload)
    job = _load_job(nodes=nodes, **workload)
    batch = None
    with Progress(sys.stderr) as progress:
        if job.batch:
            job, tried = choose_batch(job, constraints, objective, progress)
            batch = batch_report(job, tried)
        goal = objective_of(job, objective)
        found = search(
            job,
            constraints,
            objective=goal,
            solver=solver,
            time_limit=time_limit,
            top=top,
            simpler_within=AS_GOOD,
            reporter=progress,
        )
    if stats:
        write_stats(progress, stats)
    if isinstance(found, NothingFits):
        return _show_nothing_fits(job, constraints, found, as_json=as_json)
    found = replace(found, batch=batch)
    if output:
        write_plan(found, output, replace=force)
    if as_json:
        _print(plan_to_json(found))
    else:
        _show_plan(found, output, command=ctx.obj)
    if found.step_seconds > goal.longest_step_seconds:
        sys.stderr.write("no layout meets the deadline; this is the fastest\n")
        return ExitCode.NOTHING_FITS
    return ExitCode.OK


@cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="PLAN | MODEL CLUSTER [TRAINING.yaml]")
@click.option("--layout", metavar="LAYOUT", help="The layout to price, as in tp=8,pp=4,mbs=1.")
@nodes_option(ranges=False)
@workload_options
@question_options
@report_options
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    *,
    targets: Sequence[str],
    layout: str | None,
    as_json: bool,
    why_not: tuple[str, ...],
    what_if: tuple[str, ...],
    schedules: bool,
    collectives: bool,
    batch: bool,
    scaling: str | None,
    html: Path | None,
    trace: Path | None,
    ranks: bool,
    force: bool,
    **workload: Any,
) -> int:
    """Show the cost of a plan or a layout, formula by formula, or answer questions about it.

    PLAN is a file that `planner plan -o` wrote, or - for standard input. With --html or --trace only files are
    written, unless there is a question to answer; the page has the answers too. FILE may be - for standard output.
    """
    from planner.explain.report import Questions, explanation_to_json
    from planner.explain.report import explain as take_apart
    from planner.show.explain import answers, explanation
    from planner.show.progress import Progress
    from planner.show.trace import trace_text

    if ranks and trace is None:
        raise click.UsageError("--ranks goes with --trace")
    to_output = [name for name, path in (("--html", html), ("--trace", trace)) if path and str(path) == "-"]
    if len(to_output) + as_json > 1:
        raise click.UsageError("only one of --html -, --trace - and --json can go to standard output")
    _check_writable(*(path for path in (html, trace) if str(path) != "-"), force=force)
    if len(targets) == 1:
        others = {"targets", "as_json", "html", "trace", "ranks", "force", *(field.name for field in fields(Questions))}
        workload_names = {param.name or "" for param in ctx.command.params} - others
        _refuse_options(ctx, workload_names, "a plan is priced already; these go with MODEL CLUSTER")
        priced = _read_plan(targets[0])
    else:
        priced = _price(targets, layout, **workload)
    questions = Questions(
        why_not=why_not, what_if=what_if, schedules=schedules, collectives=collectives, batch=batch, scaling=scaling
    )
    with Progress(sys.stderr, first="pricing") as progress:
        found = take_apart(priced, questions, reporter=progress, tell=progress.about)
    if html:
        _write(html, _page(found), force=force)
    if trace:
        _write(trace, trace_text(priced, ranks=ranks), force=force)
    if as_json:
        _print(explanation_to_json(found))
    elif questions != Questions() and not to_output:
        _render(answers(found))
    elif not html and not trace:
        _render(explanation(found))
    return ExitCode.OK


@cli.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@json_option
def diff(before: str, after: str, as_json: bool) -> int:
    """Set plan B beside plan A: inputs, layout, and every line of time and memory.

    A and B are files that `planner plan -o` wrote; one of them may be - for standard input.
    """
    from planner.explain.difference import difference_of
    from planner.show.difference import difference_view

    if before == after == "-":
        raise InputError("only one plan can come from standard input", hint="write the other one to a file")
    found = difference_of(_read_plan(before), _read_plan(after))
    if as_json:
        _print(found.model_dump_json(indent=1) + "\n")
    else:
        _render(difference_view(found, names=("A", "B")))
    return ExitCode.OK


@cli.command()
@plan_argument
@run_options
@place_options
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Where the run lives; runs/PLAN.")
@click.option("--dry-run", is_flag=True, help="Print the command of each host and start nothing.")
def launch(
    plan_path: Path,
    output: Path | None,
    dry_run: bool,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    **options: Any,
) -> int:
    """Train by PLAN, then compare the forecast with what happened.

    Where the plan fills several hosts, run this on each of them, with the same folders in sight. Under Slurm and
    Kubernetes a host knows its place; elsewhere --node-rank and --master-addr say it.
    """
    from planner.emit.torchrun import RunArguments
    from planner.launch import launch as start

    output = output or _run_folder(plan_path)
    place = {"node_rank": node_rank, "master_addr": master_addr, "master_port": master_port}
    code = start(plan_path, output=output, arguments=RunArguments(**options), dry_run=dry_run, **place)
    if code == ExitCode.OK and not dry_run:
        _show_comparison(output)
    return code


@cli.command()
@plan_argument
@click.option(
    "--to",
    type=click.Choice(["torchrun", "slurm", "megatron"]),
    default="torchrun",
    show_default=True,
    help="For what; megatron takes plans made with --engine megatron.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Write script and plan here.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@run_options
def emit(plan_path: Path, to: str, output: Path | None, force: bool, **options: Any) -> int:
    """Write what runs PLAN elsewhere: a script for torchrun, Slurm or Megatron-LM, and the plan beside it.

    Without -o nothing is written: the script is printed, and for torchrun the command of each host.
    """
    from planner.emit.bundle import TARGETS, write_bundle
    from planner.emit.torchrun import RunArguments, check_engine, torchrun_commands

    if str(plan_path) == "-" and to == "torchrun" and output is None:
        raise InputError("the command needs the plan's file", hint="write it first, `planner plan ... -o plan.json`")
    priced, arguments = _read_plan(str(plan_path)), RunArguments(**options)
    check_engine(priced, "megatron" if to == "megatron" else "torch")
    if output is not None:
        for path in write_bundle(priced, to, output, arguments=arguments, force=force):
            _say_written(path)
    elif to == "torchrun":
        lines = torchrun_commands(priced, plan_path, output=_run_folder(plan_path), arguments=arguments)
        _print("".join(f"{line}\n" for line in lines))
    else:
        _print(TARGETS[to][1](priced, arguments=arguments))
    return ExitCode.OK


@cli.command()
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUNS.csv")
@json_option
def accuracy(runs: Path, as_json: bool) -> int:
    """Set predictions beside the measured runs of a table.

    RUNS.csv has the columns of tests/published/measurements.csv; cells may be blank. A run that cannot be priced
    is listed with the reason.
    """
    from planner.accuracy.report import report_of, report_to_json
    from planner.show.accuracy import accuracy as tables
    from planner.show.progress import Progress

    with Progress(sys.stderr, first="pricing the runs"):
        report = report_of(runs)
    if as_json:
        _print(report_to_json(report))
    else:
        _render(tables(report))
    return ExitCode.OK


@cli.command()
@click.argument("name", required=False)
@json_option
def models(name: str | None, as_json: bool) -> int:
    """List the models that are shipped, or show NAME whole."""
    from planner.show import library

    if name:
        return _show_entry(library.one_model(name), library.entry_text, as_json=as_json)
    return _show_entry(library.model_entries(), library.model_table, as_json=as_json)


@cli.command()
@click.argument("name", required=False)
@click.option("--detect", is_flag=True, help="Describe this machine, as a document to save and plan with.")
@json_option
def clusters(name: str | None, detect: bool, as_json: bool) -> int:
    """List the clusters that are shipped, or show NAME whole."""
    from planner.show import library

    if name and detect:
        raise click.UsageError(f"--detect describes this machine; leave out {name}, or --detect")
    if detect:
        return _show_entry(library.this_machine(), library.entry_text, as_json=as_json)
    if name:
        return _show_entry(library.one_cluster(name), library.entry_text, as_json=as_json)
    return _show_entry(library.cluster_entries(), library.cluster_table, as_json=as_json)


@cli.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@json_option
def glossary(words: tuple[str, ...], as_json: bool) -> int:
    """Explain WORD, a term of the output or a key of a layout; without one, all terms."""
    import json

    from planner.show.glossary import glossary_to_dict, glossary_view
    from planner.specs.glossary import entries_of

    found = entries_of(words)
    if as_json:
        _print(json.dumps(glossary_to_dict(found), indent=1) + "\n")
    else:
        _render(glossary_view(found))
    return ExitCode.OK


# --- what the commands share ------------------------------------------------------------------------------------


def _load_job(**workload: Any) -> AnyJob:
    from planner.specs.load import load_any_job, model_notes

    if isinstance(nodes := workload.get("nodes"), dict):
        workload["nodes"] = {pool: hosts[-1] for pool, hosts in nodes.items()}
    job = load_any_job(**{name: value for name, value in workload.items() if value is not None})
    for note in model_notes(workload["model"]):
        sys.stderr.write(f"note: {note}\n")
    return job


def _price(targets: Sequence[str], layout: str | None, **workload: Any) -> Plan:
    """Price the layout that the user wrote for MODEL on CLUSTER."""
    from planner.layout import parse_layout
    from planner.search.search import plan_for_layout
    from planner.specs.job import MixedJob, pools_of

    if len(targets) > 3:
        raise click.UsageError(f"too many arguments: {shlex.join(targets[3:])}")
    if layout is None:
        raise click.UsageError("say which layout to price: --layout tp=8,pp=4,...; `planner plan` chooses one")
    model, cluster, training = (*targets, None)[:3]
    job = _load_job(model=model, cluster=cluster, training=training, **workload)
    _refuse_batch_range(job, "one layout is priced with one batch size")
    pools = {pool.cluster.name: pool.num_devices for pool in pools_of(job)}
    num_devices = pools if isinstance(job, MixedJob) else job.num_devices
    return plan_for_layout(job, parse_layout(layout, num_layers=job.model.num_layers, num_devices=num_devices))


_OF_ONE_SIZE = {"objective", "top", "solver", "time_limit", "output", "stats"}


def _refuse_options(ctx: click.Context, names: Collection[str], why: str) -> None:
    """Options that would be ignored in silence."""
    given = [
        param.opts[0]
        for param in ctx.command.params
        if param.name in names and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)}: {why}")


def _refuse_batch_range(job: AnyJob, why: str) -> None:
    if job.batch:
        hint = "give one number of sequences, as in --global-batch 1024; `planner plan` chooses from a range"
        raise InputError(why, where="global_batch_size", hint=hint)


def _sweep(nodes: range | dict[str, range], constraints: Constraints, *, as_json: bool, **workload: Any) -> int:
    """Compare clusters of many sizes."""
    from planner.search.sweep import sweep, sweep_pools
    from planner.show.progress import Progress
    from planner.show.sweep import sweep_to_json, sweep_view
    from planner.specs.job import Job

    job = _load_job(nodes=nodes[-1] if isinstance(nodes, range) else nodes, **workload)
    with Progress(sys.stderr) as progress:
        if isinstance(job, Job):
            assert isinstance(nodes, range), "a cluster of one kind has no pools"
            found = sweep(job, constraints, nodes, progress)
        else:
            assert not isinstance(nodes, range), "a mixed cluster has no one size"
            found = sweep_pools(job, constraints, nodes, progress)
    if as_json:
        _print(sweep_to_json(job, found))
    else:
        _render(sweep_view(job, found))
    return ExitCode.OK if found.front else ExitCode.NOTHING_FITS


def _read_plan(name: str) -> Plan:
    from planner.plan import plan_from_json, read_plan

    if name != "-":
        return read_plan(Path(name))
    return plan_from_json(sys.stdin.buffer.read().decode("utf-8", "replace"), name="standard input")


def _check_writable(*paths: Path | None, force: bool) -> None:
    """Refuse before a long search what could not be written after it."""
    for path in filter(None, paths):
        if str(path) == "-":
            raise InputError("`-` is no file name here", hint="--json prints the plan on standard output")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file")
        if path.exists() and not force:
            raise InputError(f"{path} exists", hint="add --force to replace it, or choose another name")
        if not os.access(path.parent, os.W_OK):
            raise EnvironmentProblem(f"cannot write {path}: its folder is missing or may not be written")


def _page(found: Explanation) -> Iterator[str]:
    from planner.cost.estimate import estimate
    from planner.explain.executed import executed_step
    from planner.explain.plan_inputs import job_of
    from planner.explain.replicas import replicas_of
    from planner.explain.what_if import layout_gains
    from planner.show.page.render import page_text

    plan, job = found.plan, job_of(found.plan)
    step = executed_step(job, plan.layout, estimate(job, plan.layout).time)
    yield page_text(found, step, replicas=replicas_of(plan), gains=layout_gains(plan))


def _write(path: Path, pieces: Iterable[str], *, force: bool) -> None:
    """Write a file and say so, or to standard output for `-`."""
    from planner.plan import write_text
    from planner.show.progress import Progress
    from planner.show.screen import clean

    text = ""
    with Progress(sys.stderr, first=f"writing {clean(path)}"):
        if str(path) == "-":
            text = "".join(pieces)
        else:
            write_text(path, pieces, replace=force)
    if text:
        _print(text)
    else:
        _say_written(path)


def _say_written(path: Path) -> None:
    from planner.show.screen import clean

    sys.stderr.write(f"wrote {clean(path)}\n")


def _show_plan(found: Plan, output: Path | None, *, command: str) -> None:
    from planner.show.summary import next_command, summary

    _render(summary(found, next_command(found, command, output)))


def _show_nothing_fits(job: AnyJob, constraints: Constraints, found: NothingFits, *, as_json: bool) -> int:
    from planner.search.remedies import lifted_pins, remedies
    from planner.show.nothing_fits import nothing_fits, nothing_fits_to_json
    from planner.show.progress import Progress

    with Progress(sys.stderr) as progress:
        changes = remedies(job, constraints, progress)
        pins = lifted_pins(job, constraints, progress)
    if as_json:
        from planner.search.search import plan_for_layout

        _print(nothing_fits_to_json(plan_for_layout(job, found.layout), found, changes, pins))
    else:
        _render(nothing_fits(job, found, changes, pins))
    return ExitCode.NOTHING_FITS


def _run_folder(plan_path: Path) -> Path:
    """Where a run lives by default; a plan from standard input has no name to take."""
    return Path("runs") / (plan_path.stem if str(plan_path) != "-" else "plan")


def _show_comparison(output: Path) -> None:
    """Set what the run in `output` measured against the plan that it kept."""
    import json

    from planner.measured import compare
    from planner.show.comparison import comparison

    measured = output / "measurements.json"
    if measured.exists():
        plan_of_run = _read_plan(str(output / "plan.json"))
        _render(comparison(compare(plan_of_run, json.loads(measured.read_text(encoding="utf-8")))))


def _show_entry(found: Any, layout: Callable[[Any], RenderableType], *, as_json: bool) -> int:
    import json

    text = json.dumps(found, indent=1) + "\n" if as_json else layout(found)
    if isinstance(text, str):  # a document is not laid out for a screen
        _print(text)
    else:
        _render(text)
    return ExitCode.OK


def _render(renderable: RenderableType) -> None:
    from planner.show.screen import Screen, to_text

    _print(to_text(renderable, Screen.of(sys.stdout)))


def _print(text: str) -> None:
    """Write a result; what the terminal's encoding cannot say is escaped rather than fatal."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


# --- the process ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; only a bug raises."""
    try:
        code = _invoke(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads our output has seen enough
        return ExitCode.OK
    except OSError as error:
        if error.filename is not None:  # a file that a command should have looked after
            raise
        return _report(EnvironmentProblem(f"cannot write the output: {error.strerror}"))
    return code


def _invoke(argv: Sequence[str]) -> int:
    command = shlex.join(["planner", *argv])
    try:
        return int(cli.main(list(argv), prog_name="planner", standalone_mode=False, obj=command) or ExitCode.OK)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "planner"
        return _report(InputError(error.format_message(), hint=f"see `{path} --help`"))
    except PlannerError as error:
        return _report(error)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except _Terminated:
        return ExitCode.TERMINATED
    except SystemExit:  # no command exits by itself; click does when the reader of our output has gone
        return ExitCode.OK


def _report(error: PlannerError) -> int:
    from planner.show.mistakes import mistakes_text
    from planner.show.screen import Screen

    with contextlib.suppress(OSError):  # where nothing can be said, the exit code still tells
        sys.stderr.write(mistakes_text(error, Screen.of(sys.stderr)))
    return error.exit_code


def _terminate(signum: int, frame: object) -> NoReturn:  # noqa: ARG001 - the signature of a signal handler
    raise _Terminated


def _open_missing_streams() -> None:
    """Give a closed standard stream to the null device, or the next file that is opened would receive our output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _drop_unwritable_output() -> None:
    """Give what a stream still holds and cannot write to the null device.

    The interpreter would try again at its end, and exit with 120 in place of our code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run() -> NoReturn:
    """The console entry: `main` with the arguments, signals and streams of this process.

    Nearly everything that lives as long as this short process is made by imports: looking for cycles in it every 700
    objects is a tenth of the time of a plan.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    _open_missing_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = main(sys.argv[1:])
    finally:
        _drop_unwritable_output()
    sys.exit(code)
