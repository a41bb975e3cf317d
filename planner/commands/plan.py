"""`planner plan`: find a layout, compare sizes of a cluster, or say why nothing fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import file_option, json_option, nodes_option, read_by, refuse_options, workload_options
from planner.errors import ExitCode
from planner.units import parse_share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from planner.api import Nodes, NoLayoutFits, Plan, Sizes, Workload
    from planner.plan_parts import ObjectiveName
    from planner.search.optimum.integer_program import SolverName


def run(
    model: str,
    cluster: str,
    training: str | None = None,
    *,
    console: Console,
    nodes: Nodes | None = None,
    sizes: Sizes | None = None,
    pin: Sequence[str] = (),
    forbid: Sequence[str] = (),
    objective: ObjectiveName = "throughput",
    confidence: float = 0.8,
    top: int = 3,
    solver: SolverName = "cbc",
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

    sizes: many `nodes`, which are compared; then nothing else counts but the pins. stats: a file for how the solve
    went. command_line: what the user typed, for the next step to offer.

    Raises:
        PlannerError: as `planner.api.plan_job`, or a file that must not be written.
    """
    from planner.api import NoLayoutFits, compare_sizes, plan_job
    from planner.fit import chance_words
    from planner.plan import write_plan
    from planner.show.progress import write_stats
    from planner.show.summary import next_command, summary
    from planner.show.sweep import sweep_to_json, sweep_view

    check_writable(output, stats, force=force)
    if sizes is not None:
        with console.progress() as progress:
            sweep = compare_sizes(
                model, cluster, training, nodes=sizes, pin=pin, forbid=forbid, reporter=progress, **workload
            )
        console.render(sweep_to_json(sweep) if as_json else sweep_view(sweep))
        return ExitCode.OK if sweep.front else ExitCode.NOTHING_FITS
    found: Plan | NoLayoutFits
    with console.progress() as progress:
        try:
            found = plan_job(
                model,
                cluster,
                training,
                nodes=nodes,
                pin=pin,
                forbid=forbid,
                objective=objective,
                confidence=confidence,
                top=top,
                solver=solver,
                time_limit=time_limit,
                check=check,
                reporter=progress,
                **workload,
            )
        except NoLayoutFits as nothing_fits:
            found = nothing_fits
    if stats:
        write_stats(progress, stats)
    if isinstance(found, NoLayoutFits):
        return _show_nothing_fits(found, console, as_json=as_json)
    if output:
        write_plan(found, output, replace=force)
    console.render(found.to_json() if as_json else summary(found, next_command(found, command_line, output)))
    if not found.fits:
        console.err.write(f"no layout fits; this one is the likeliest to: {chance_words(found.chance_of_fitting)}\n")
        return ExitCode.NOTHING_FITS
    if objective in ("cost", "gpus") and found.run and found.run.meets_deadline is False:
        console.err.write("no layout meets the deadline; this is the fastest\n")
        return ExitCode.NOTHING_FITS
    return ExitCode.OK


def _show_nothing_fits(found: NoLayoutFits, console: Console, *, as_json: bool) -> int:
    from planner.show.nothing_fits import nothing_fits, nothing_fits_to_json

    with console.progress() as progress:
        changes, pins = found.remedies(progress), found.lifted_pins(progress)
    if as_json:
        console.print(nothing_fits_to_json(found.nearest, found.found, changes, pins))
    else:
        console.render(nothing_fits(found.job, found.found, changes, pins))
    return ExitCode.NOTHING_FITS


_OF_ONE_SIZE = {"objective", "confidence", "top", "solver", "time_limit", "check", "output", "stats"}


@click.command("plan")
@click.argument("model")
@click.argument("cluster")
@click.argument("training", required=False, metavar="[TRAINING.yaml]")
@nodes_option(ranges=True)
@workload_options
@click.option("--pin", multiple=True, metavar="LAYOUT", help="Keep to this, as in tp=8 or mbs<=4.")
@click.option("--forbid", multiple=True, metavar="LAYOUT", help="Leave this combination out.")
@click.option(
    "--objective",
    type=click.Choice(["throughput", "cost", "gpus", "memory"]),
    default="throughput",
    show_default=True,
    help="What to be best at; cost and gpus keep to the deadline.",
)
@click.option(
    "--confidence",
    callback=read_by(parse_share),
    default="80%",
    show_default=True,
    metavar="SHARE",
    help="Chance with which cost and gpus keep to the deadline.",
)
@click.option("--top", type=click.IntRange(1, 100), default=3, show_default=True, metavar="K", help="Layouts to list.")
@click.option("--solver", type=click.Choice(["cbc", "highs"]), default="cbc", show_default=True, help="Integer solver.")
@click.option("--time-limit", type=click.FloatRange(0, min_open=True), metavar="S", help="Seconds for the solver.")
@click.option(
    "--check", is_flag=True, help="Compare lower bounds with optima of 64 configurations that they ruled out."
)
@file_option("-o", "--output", help="Write the plan here.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@file_option("--stats", help="Write how the solve went and how long it took.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Find the fastest layout for MODEL on CLUSTER.

    MODEL and CLUSTER are shipped names (`planner models`, `planner clusters`) or YAML files; MODEL may be a
    Hugging Face config.json or its folder too. Without -o nothing is written. The exit code is 3 when no layout
    fits into memory, or none meets the deadline; where some may fit, the likeliest is the answer all the same.
    """
    nodes = options["nodes"]
    if any(isinstance(hosts, range) for hosts in (nodes.values() if isinstance(nodes, dict) else [nodes])):
        refuse_options(ctx, _OF_ONE_SIZE, "is of one size; --nodes A..B shows what is best at each objective")
        options["sizes"] = options.pop("nodes")
    return run(console=Console(), command_line=ctx.obj, **options)
