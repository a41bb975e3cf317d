"""`planner plan`: finds a layout, compares sizes of a cluster, or reports why nothing fits."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import (
    cluster_names_of,
    file_option,
    foreign_options,
    json_option,
    nodes_option,
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

    sizes: several values of `nodes` to compare; the search then ignores all its options except pin, forbid, objective
    and confidence.
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
        sized: Any = {"nodes": sizes, "pin": pin, "forbid": forbid, "confidence": confidence, "objective": objective}
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
        console.err.write(_why(found, lacking.missed))
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
        what = f"meet the {' and the '.join(lacking.missed)}" if lacking.missed else "fit"
        title = f"What would {what} on {lacking.job.cluster.name}"
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


def _why(found: Plan, missed: Sequence[str]) -> str:
    """Why the exit code of a plan is 3."""
    from planner.fit import chance_words

    if not found.fits:
        return f"no layout fits; this one is the likeliest to: {chance_words(found.chance_of_fitting)}\n"
    is_proved = found.certificate is not None and found.certificate.status == "optimal"
    best = "fastest" if "deadline" in missed else "cheapest"
    words = f"no layout meets the {' and the '.join(missed)}; this is the {best}"
    return f"{words}{'' if is_proved else ' that was found'}\n"


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
    "from_file", "within", "top", "solver", "time_limit", "check", "output", "stats"
}  # fmt: skip
_OF_ONE_CLUSTER = {"from_file", "top", "check", "output", "stats"}


@click.command("plan")
@click.argument("model")
@click.argument("cluster", required=False)
@click.argument("training", required=False, metavar="[TRAINING.yaml]")
@foreign_options
@nodes_option(ranges=True)
@workload_options
@click.option(
    "--pin", multiple=True, metavar="LAYOUT", help="Search only layouts with these values, as in tp=8 or mbs<=4."
)
@click.option("--forbid", multiple=True, metavar="LAYOUT", help="Exclude layouts with this combination of values.")
@click.option(
    "--objective",
    type=click.Choice(["throughput", "cost", "gpus", "memory"]),
    default="throughput",
    show_default=True,
    help="Quantity to optimize; cost and gpus meet the deadline, all but memory the budget.",
)
@share_option(
    "--within", help="Share of the objective that a simpler layout may cost; 2% by default, 0 for the minimum."
)
@share_option("--confidence", default="80%", help="Chance with which the deadline and the budget must be met.")
@click.option(
    "--top",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    metavar="K",
    help="Largest number of runners-up.",
)
@click.option(
    "--solver",
    type=click.Choice(["cbc", "highs"]),
    help="Solver of the integer program; by default CBC, or HiGHS where PuLP came without CBC.",
)
@click.option(
    "--time-limit", type=click.FloatRange(0, min_open=True), metavar="S", help="Time limit of the search, in seconds."
)
@click.option(
    "--check", is_flag=True, help="Compare lower bounds with the optima of 64 configurations that they ruled out."
)
@file_option("-o", "--output", help="Write the plan here; - for standard output, like --json.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@file_option("--stats", help="Write statistics and times of the solve.")
@file_option("--html", help="For several clusters, write a page with a chart of time and cost.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Find the fastest layout for MODEL on CLUSTER.

    Several clusters, as in p5:4,g6e:8,mine.yaml, are compared by time, cost and energy; a number after the colon is
    the number of hosts.

    MODEL and CLUSTER are shipped names (`planner models`, `planner clusters`) or YAML files. MODEL may also be the
    Hub id of a shipped model, a Hugging Face config.json, or its folder. Without -o nothing is written. The exit
    code is 3 if no layout fits into memory, or if none meets the deadline or budget of the objective. If no layout
    fits but some may fit, the most likely one is shown.

    With --from FILE give only CLUSTER: model and training come from a file of another program.
    """
    from planner.specs.cluster_documents import check_num_choices

    _name_model(ctx, options)
    nodes, names = options["nodes"], cluster_names_of(options["cluster"])
    sizes = [nodes] if not isinstance(nodes, dict) else [*nodes.values()]
    is_range = any(isinstance(hosts, range) for hosts in sizes)
    if len(names) > 1 or (is_range and options["objective"] == "memory"):  # a search for each size
        check_num_choices(len(names) * (len(nodes) if isinstance(nodes, range) else 1))
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
    if is_range:
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
