"""`planner plan`: finds a layout, compares sizes of a cluster, or reports why nothing fits."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import (
    Command,
    cluster_names_of,
    file_option,
    force_option,
    group,
    help_option,
    json_option,
    machine_options,
    refuse_options,
    share_option,
    workload_options,
)
from planner.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from planner.api import Nodes, NoLayoutFits, Plan, Shortfall, Sizes, Workload
    from planner.plan_parts import ObjectiveName
    from planner.search.optimum.integer_program import SolverName


def run(
    model: str,
    cluster: str,
    training: str | None = None,
    *,
    console: Console,
    from_file: Sequence[Path] = (),
    define: Sequence[str] = (),
    args: str | None = None,
    ignore: Sequence[str] = (),
    nodes: Nodes | None = None,
    sizes: Sizes | None = None,
    pin: Sequence[str] = (),
    forbid: Sequence[str] = (),
    objective: ObjectiveName = "throughput",
    within: float | None = None,
    confidence: float = 0.8,
    top: int = 3,
    solver: SolverName | None = None,
    time_limit: float | None = None,
    check: bool = False,
    output: Path | None = None,
    force: bool = False,
    stats: Path | None = None,
    as_json: bool = False,
    command_line: str = "planner plan",
    **workload: Unpack[Workload],
) -> int:
    """Print the best layout, write it to `output`, and return the exit code.

    sizes: several values of `nodes` to compare; the search then ignores all its options except pin, forbid and
    confidence.
    stats: a file for the counts and times of the search.
    command_line: the command as the user typed it, which the suggested next command extends.

    Raises:
        PlannerError: as `planner.api.plan_job`, or an output file exists and `force` is false.
    """
    from planner.api import NoLayoutFits, plan_file, plan_job, shortfall
    from planner.plan import plan_to_dict, write_plan
    from planner.show.nothing_fits import nothing_fits, nothing_fits_to_dict
    from planner.show.progress import write_stats
    from planner.show.summary import next_command, summary

    if output is not None and str(output) == "-":
        output, as_json = None, True
    check_writable(output, stats, force=force)
    if sizes is not None:
        documents = (model, cluster, training)
        sized: Any = {"nodes": sizes, "pin": pin, "forbid": forbid, "confidence": confidence}
        return _sizes(documents, console, as_json=as_json, **sized, **workload)
    found: Plan | NoLayoutFits
    with console.progress() as progress:
        try:
            own: Any = {"model": model or None, "define": define, "args": args, "ignore": ignore}
            ask: Any = partial(plan_file, from_file, **own) if from_file else plan_job
            found = ask(
                *([] if from_file else [model]),
                cluster,
                training,
                nodes=nodes,
                pin=pin,
                forbid=forbid,
                objective=objective,
                **({} if within is None else {"within": within}),
                confidence=confidence,
                top=top,
                solver=solver,
                time_limit=time_limit,
                check=check,
                reporter=progress,
                **workload,
            )
        except NoLayoutFits as error:
            found = error
    if stats:
        write_stats(progress, stats)
    if isinstance(found, NoLayoutFits):
        shown = nothing_fits(found.job, found.found)
        return _answer(nothing_fits_to_dict(found.nearest, found.found), shown, found, console, as_json=as_json)
    if output:
        write_plan(found, output, replace=force)
    is_interrupted = found.certificate is not None and found.certificate.status == "interrupted"
    lacking = None if is_interrupted else shortfall(found, objective)
    view = summary(found, "" if lacking else next_command(found, command_line, output))
    code = _answer(plan_to_dict(found), view, lacking, console, as_json=as_json)
    if is_interrupted:
        console.err.write("interrupted: this is the best layout until then\n")
        return ExitCode.INTERRUPTED
    if lacking:
        console.err.write(_why(found))
    return code


def _answer(
    document: dict[str, Any], shown: RenderableType, lacking: Shortfall | None, console: Console, *, as_json: bool
) -> int:
    """Print an answer, with the changes that would help if it falls short of what was asked; return the exit code."""
    from planner.show.nothing_fits import ways_out, ways_out_to_dict
    from planner.show.screen import stack

    if lacking:
        with console.progress() as progress:
            ways = lacking.remedies(progress), lacking.lifted_pins(progress)
        title = f"What would {'meet the deadline' if lacking.in_time else 'fit'} on {lacking.job.cluster.name}"
        document, shown = document | ways_out_to_dict(*ways), stack(shown, ways_out(*ways, title))
    console.render(json.dumps(document, indent=1, allow_nan=False) + "\n" if as_json else shown)
    return ExitCode.NOTHING_FITS if lacking else ExitCode.OK


def _sizes(documents: tuple[str, str, str | None], console: Console, *, as_json: bool, **asked: Any) -> int:
    """Print the best layout for each size of the cluster, and return the exit code."""
    from planner.api import compare_sizes, shortfall
    from planner.show.sweep import sweep_to_dict, sweep_view

    with console.progress() as progress:
        sweep = compare_sizes(*documents, reporter=progress, **asked)
    return _answer(sweep_to_dict(sweep), sweep_view(sweep), shortfall(sweep), console, as_json=as_json)


def _why(found: Plan) -> str:
    """Why the exit code of a plan is 3."""
    from planner.fit import chance_words

    if not found.fits:
        return f"no layout fits; this one is the likeliest to: {chance_words(found.chance_of_fitting)}\n"
    is_proved = found.certificate is not None and found.certificate.status == "optimal"
    return f"no layout meets the deadline; this is the fastest{'' if is_proved else ' that was found'}\n"


def compare(
    model: str,
    clusters: Sequence[str],
    training: str | None = None,
    *,
    console: Console,
    nodes: int | Sequence[int] | None = None,
    html: Path | None = None,
    force: bool = False,
    as_json: bool = False,
    **options: Any,
) -> int:
    """Print the time and cost of a job on each of several clusters, write the page, and return the exit code.

    Raises:
        PlannerError: as `planner.api.compare_clusters`, or an output file exists and `force` is false.
    """
    from planner.api import compare_clusters, shortfall
    from planner.show.page.comparison import comparison_page
    from planner.show.side_by_side import side_by_side_to_dict, side_by_side_view

    check_writable(html, force=force)
    with console.progress() as progress:
        found = compare_clusters(model, clusters, training, nodes=nodes, reporter=progress, **options)
    if html:
        console.write(html, [comparison_page(found)], force=force)
    return _answer(side_by_side_to_dict(found), side_by_side_view(found), shortfall(found), console, as_json=as_json)


_OF_ONE_SIZE = {
    "from_file", "objective", "within", "top", "solver", "time_limit", "check", "output", "stats"
}  # fmt: skip
_OF_ONE_CLUSTER = {"from_file", "top", "check", "output", "stats"}


@click.command("plan", cls=Command)
@click.argument("model", required=False)
@click.argument("cluster", required=False)
@click.argument("training", required=False, metavar="[TRAINING.yaml]")
@workload_options
@machine_options(ranges=True)
@group(
    "Search",
    click.option("--pin", multiple=True, metavar="LAYOUT", help="Only layouts with these values, tp=8 or mbs<=4."),
    click.option("--forbid", multiple=True, metavar="LAYOUT", help="No layout with this combination of values."),
    click.option(
        "--objective",
        type=click.Choice(["throughput", "cost", "gpus", "memory"]),
        default="throughput",
        metavar="NAME",
        help="throughput, memory, or cost or gpus of a deadline.",
    ),
    share_option("--within", help="Loss to accept for a simpler layout; 2%."),
    share_option("--confidence", default="80%", help="Chance of meeting the deadline."),
    click.option(
        "--solver", type=click.Choice(["cbc", "highs"]), help="By default CBC, or HiGHS where PuLP has no CBC."
    ),
    click.option("--time-limit", type=click.FloatRange(0, min_open=True), metavar="S", help="Seconds for the search."),
    click.option("--check", is_flag=True, help="Check the bounds on 64 configurations they ruled out."),
)
@group(
    "Answer",
    click.option(
        "--top",
        type=click.IntRange(1, 100),
        default=3,
        show_default=True,
        metavar="K",
        help="Most runners-up to list.",
    ),
    json_option,
)
@group(
    "Output",
    file_option("-o", "--output", help="Write the plan; - for standard output, like --json."),
    file_option("--html", help="For several clusters, a page with charts."),
    file_option("--stats", help="Write statistics and times of the solve."),
    force_option,
    help_option,
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Find the fastest layout for MODEL on CLUSTER.

    MODEL and CLUSTER are shipped names (`planner models`, `planner clusters`) or files; MODEL may be a Hub id or a
    config.json. Several clusters, as in p5,g6e, are compared. Without CLUSTER it plans for this machine. With --from
    FILE give only CLUSTER. Exit code 3: no layout fits, or none meets the deadline.
    """
    _name_model(ctx, options)
    nodes, names = options["nodes"], cluster_names_of(options["cluster"])
    if len(names) > 1:
        refuse_options(ctx, _OF_ONE_CLUSTER, "is of one cluster; a list of clusters sets them side by side")
        if isinstance(nodes, dict):
            raise click.UsageError("--nodes: hosts of pools are those of one mixed cluster; write N or A..B")
        for name in ("cluster", "define", "args", "ignore", *_OF_ONE_CLUSTER):
            del options[name]
        if options["within"] is None:
            del options["within"]
        return compare(options.pop("model"), names, console=Console(), **options)
    options["cluster"] = names[0]
    refuse_options(ctx, {"html"}, "is of several clusters; `planner explain PLAN --html` writes the page of a plan")
    del options["html"]
    if any(isinstance(hosts, range) for hosts in (nodes.values() if isinstance(nodes, dict) else [nodes])):
        refuse_options(ctx, _OF_ONE_SIZE, "is of one size; --nodes A..B shows what is best at each objective")
        options["sizes"] = options.pop("nodes")
    return run(console=Console(), command_line=ctx.obj, **options)


def _name_model(ctx: click.Context, options: dict[str, Any]) -> None:
    """With --from the first argument is the cluster, and the second the training document."""
    own_model = options.pop("from_model")
    if options["from_file"]:  # MODEL is left out
        if options["training"] is not None:
            raise click.UsageError("--from FILE goes with CLUSTER and TRAINING.yaml alone; --model names the model")
        if ctx.get_parameter_source("engine") is not click.core.ParameterSource.COMMANDLINE:
            del options["engine"]
        options |= {"model": own_model or "", "cluster": options["model"], "training": options["cluster"]}
    elif options["cluster"] is None:
        raise click.UsageError("Missing argument 'CLUSTER'.")
    elif own_model or options["define"] or options["args"] or options["ignore"]:
        raise click.UsageError("--model, --define, --args and --ignore go with --from FILE")
