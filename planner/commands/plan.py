"""`planner plan`: finds a layout, compares sizes of a cluster, or reports why nothing fits."""

from __future__ import annotations

import json
import math
import shlex
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import (
    Command,
    cluster_names_of,
    file_option,
    force_option,
    given_options,
    group,
    help_option,
    json_option,
    machine_options,
    refuse_options,
    share_option,
    workload_options,
)
from planner.errors import ExitCode, InputError
from planner.specs.files import is_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from planner.answers.shortfall import Shortfall
    from planner.asked import Sizes
    from planner.plan import Plan
    from planner.specs.cluster import ClusterSpec


def run(
    model: str,
    cluster: str | ClusterSpec | None,
    training: str | None = None,
    *,
    console: Console,
    from_file: Sequence[Path] = (),
    sizes: Sizes | None = None,
    output: Path | None = None,
    force: bool = False,
    stats: Path | None = None,
    as_json: bool = False,
    command_line: str = "planner plan",
    **asked: Any,
) -> int:
    """Print the best layout, write it to `output`, and return the exit code.

    sizes: several numbers of nodes to compare.
    stats: a file for the counts and times of the search.
    command_line: the command as the user typed it, which the suggested next command extends.
    asked: keywords of `planner.api.plan_job`, with `from_file` of `planner.api.plan_file`, with `sizes` of
        `planner.api.compare_sizes`.

    Raises:
        PlannerError: as these functions, or an output file exists and `force` is false.
    """
    from planner.api import plan_file, plan_job, shortfall
    from planner.plan import plan_to_dict, write_plan
    from planner.show.progress import write_stats
    from planner.show.summary import answer, next_commands, summary

    if output is not None and str(output) == "-":
        output, as_json = None, True
    check_writable(output, stats, force=force)
    if sizes is not None:
        return _sizes((model, cluster, training), console, as_json=as_json, nodes=sizes, **asked)
    ask: Any = partial(plan_file, from_file, model=model or None) if from_file else partial(plan_job, model)
    with console.progress() as progress:
        found: Plan = ask(cluster, training, reporter=progress, **asked)
    if stats:
        write_stats(progress, stats)
    if not found.fits and found.certificate is None:
        from planner.show.nothing_fits import nothing_fits, nothing_fits_to_dict

        document, shown = nothing_fits_to_dict(found), nothing_fits(found)
        return _answer(document, shown, shortfall(found), console, as_json=as_json, fold=True)
    if output:
        write_plan(found, output, replace=force)
    is_interrupted = found.certificate is not None and found.certificate.status == "interrupted"
    lacking = None if is_interrupted else shortfall(found, asked.get("objective", found.options.objective))
    view = answer(found) if lacking else summary(found, next_commands(found, command_line, output, _free_name()))
    code = _answer(plan_to_dict(found), view, lacking, console, as_json=as_json, fold=True)
    if is_interrupted:
        console.err.write("interrupted: this is the best layout until then\n")
        return ExitCode.INTERRUPTED
    if lacking:
        console.err.write(_why(found, lacking.missed))
    return code


def _free_name() -> str:
    """A name for a plan that no file in the working folder has, so that the printed command runs."""
    return next(name for at in count(1) if not Path(name := f"plan{at if at > 1 else ''}.json").exists())


def _answer(
    document: dict[str, Any],
    shown: RenderableType,
    lacking: Shortfall | None,
    console: Console,
    *,
    as_json: bool,
    fold: bool = False,
) -> int:
    """Print an answer, with the changes that would help if it falls short of what was asked; return the exit code.

    fold: leave out the layouts of these changes if the answer would not fit on a screen.
    """
    if lacking:
        from planner.show.nothing_fits import ways_out, ways_out_to_dict
        from planner.show.screen import OneScreen, stack

        with console.progress() as progress:
            ways = lacking.remedies(progress), lacking.lifted_pins(progress)
        what = f"meet the {' and the '.join(lacking.missed)}" if lacking.missed else "fit"
        title = f"What would {what} on {lacking.job.cluster.name}"
        document |= ways_out_to_dict(*ways)
        forms = (True, False) if fold else (True,)
        shown = OneScreen(*(stack(shown, ways_out(*ways, title, layouts=each)) for each in forms))
    console.render(json.dumps(document, indent=1, allow_nan=False) + "\n" if as_json else shown)
    return ExitCode.NOTHING_FITS if lacking else ExitCode.OK


def _sizes(documents: tuple[Any, ...], console: Console, *, as_json: bool, **asked: Any) -> int:
    """Print the best layout for each size of the cluster, and return the exit code."""
    from planner.api import compare_sizes, shortfall
    from planner.show.sweep import sweep_to_dict, sweep_view

    with console.progress() as progress:
        sweep = compare_sizes(*documents, reporter=progress, **asked)
    return _answer(sweep_to_dict(sweep), sweep_view(sweep), shortfall(sweep), console, as_json=as_json)


def _why(found: Plan, missed: Sequence[str]) -> str:
    """Why the exit code of a plan is 3."""
    from planner.verdict import chance_words

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
    html: Path | None = None,
    force: bool = False,
    as_json: bool = False,
    **options: Any,
) -> int:
    """Print the time and cost of a job on each of several clusters, write the page, and return the exit code.

    Raises:
        PlannerError: as `planner.api.compare_clusters`, or an output file exists and `force` is false.
    """
    from planner.answers.side_by_side import side_by_side_to_dict, side_by_side_view
    from planner.api import compare_clusters, shortfall
    from planner.show.page.comparison import comparison_page

    check_writable(html, force=force)
    with console.progress() as progress:
        found = compare_clusters(model, clusters, training, reporter=progress, **options)
    if html:
        console.write(html, [comparison_page(found)], force=force)
    return _answer(side_by_side_to_dict(found), side_by_side_view(found), shortfall(found), console, as_json=as_json)


_OF_ONE_CLUSTER = {"from_file", "top", "check", "output", "stats"}
_OF_ONE_SIZE = _OF_ONE_CLUSTER | {"within", "solver", "time_limit"}


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
        help="throughput, memory, cost, or gpus.",
    ),
    share_option("--within", help="Loss to accept for a plan that is easier to run; 2%."),
    share_option("--confidence", default="80%", help="Chance of meeting deadline and budget."),
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
    config.json. Several clusters are compared, as in p5:4,g6e:8 with their hosts. Without CLUSTER it plans for this
    machine. With --from FILE give only CLUSTER; with --from PLAN its job is planned again, with the changes that other
    options name. Exit code 3: no layout fits, or none meets what the objective needs: cost and gpus a deadline, all
    but memory a budget.
    """
    from planner.specs.cluster_documents import check_num_choices

    console, given = Console(), given_options(ctx, options)
    _name_documents(ctx, given)
    nodes, cluster = given.get("nodes"), given["cluster"]
    names = cluster_names_of(cluster) if isinstance(cluster, str) else [cluster]
    sizes = [nodes] if not isinstance(nodes, dict) else [*nodes.values()]
    is_range = any(isinstance(hosts, range) for hosts in sizes)
    if len(names) > 1 or (is_range and given.get("objective") == "memory"):  # a search for each size
        check_num_choices(len(names) * (len(nodes) if isinstance(nodes, range) else 1))
        refuse_options(ctx, _OF_ONE_CLUSTER, "belongs to one cluster; a list compares clusters and makes no plan")
        if isinstance(nodes, dict):
            raise click.UsageError("--nodes: hosts of pools are those of one mixed cluster; write N or A..B")
        del given["cluster"]
        return compare(given.pop("model"), names, console=console, **given)
    given["cluster"] = names[0]
    refuse_options(ctx, {"html"}, "is of several clusters; `planner explain PLAN --html` writes the page of a plan")
    if is_range:
        refuse_options(ctx, _OF_ONE_SIZE, "is of one size; --nodes A..B shows what is best at each objective")
        given["sizes"] = given.pop("nodes")
    return run(console=console, command_line=ctx.obj, **given)


def _name_documents(ctx: click.Context, given: dict[str, Any]) -> None:
    """Name model, cluster and training; with --from, MODEL is left out, and a plan has a cluster of its own."""
    named = [given.pop(name, None) for name in ("model", "cluster", "training")]
    own_model = given.pop("from_model", "")
    if paths := given.get("from_file", ()):
        if named[2] is not None:
            raise click.UsageError("--from FILE goes with CLUSTER and TRAINING.yaml alone; --model names the model")
        named = [own_model, *named[:2]]
    elif named[0] is None:
        raise click.MissingParameter(ctx=ctx, param_hint="'MODEL'", param_type="argument")
    elif own_model or any(name in given for name in ("define", "args", "ignore")):
        raise click.UsageError("--model, --define, --args and --ignore go with --from FILE")
    if named[1] is None and not (len(paths) == 1 and is_plan(paths[0])):
        named[1] = _this_machine(named[0], given, ctx.obj)
    given |= zip(("model", "cluster", "training"), named, strict=True)


_USUAL: Final = ("dgx-h100", "dgx-a100", "dgx-b200")
"""Shipped clusters that are named to a user who names none."""
_ROOM: Final = 32
"""Device memory in bytes for each parameter on the clusters that are named: the states of Adam, twice."""


def _this_machine(model: str, given: dict[str, Any], command_line: str) -> ClusterSpec:
    """This machine as the cluster.

    Raises:
        InputError: it has no accelerators; the hint has commands with clusters that hold the model.
        EnvironmentProblem: its accelerators have no data sheet.
    """
    from planner.cost.parameters import num_params
    from planner.specs.by_name import load_model
    from planner.specs.cluster_documents import load_cluster
    from planner.specs.this_machine import detected_cluster

    found = detected_cluster()
    if found.kind != "cpu":
        return found
    words = shlex.split(command_line)
    place = words.index(model) + 1 if model in words else len(words)
    says_batch = "global_batch" in given or any("global_batch_size" in each for each in given.get("settings", ()))
    batch = [] if says_batch or given.get("from_file") else ["--global-batch", "512"]
    num_bytes, lines = _ROOM * num_params(load_model(model)) if model else 0, []
    for name in _USUAL:
        (pool,) = load_cluster(name).pools
        hosts = math.ceil(num_bytes / (pool.devices_per_host * pool.device.memory))
        size = ["--nodes", str(hosts)] if hosts > 1 and not {"nodes", "gpus"} & given.keys() else []
        lines.append(shlex.join([*words[:place], name, *size, *batch, *words[place:]]))
    hint = "\n".join(["name a cluster (`planner clusters` lists what is shipped), as in", *lines])
    raise InputError("no CLUSTER is given, and this machine has no accelerator to plan for", hint=hint)
