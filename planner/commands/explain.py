"""`planner explain`: prints the cost of a plan or layout, answers questions, and writes a page and a timeline."""

from __future__ import annotations

import re
import shlex
from os.path import isfile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Unpack

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import (
    Command,
    group,
    is_given,
    machine_options,
    question_options,
    refuse_options,
    report_options,
    workload_options,
)
from planner.errors import ExitCode, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Group

    from planner.answers.report import Explanation
    from planner.asked import Nodes, Workload
    from planner.plan import Plan

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
_QUESTIONS: Final = ("why_not", "what_if", "schedules", "collectives", "batch", "scaling")
_OF_FILE: Final = ("model", "define", "args", "ignore")
_ONLY_HERE: Final = re.compile(
    r" --(all|schedules|collectives|batch|ranks|(section|why-not|what-if|scaling|html|trace)([ =](?!--)('[^']*'|\S+))?)"
    r"(?=\s|$)"
)
"""Options that `planner plan` does not take, with their values, in a command as the shell has it."""
_HINT: Final = "see `planner explain --help`"


def run(
    targets: Sequence[str],
    *,
    console: Console,
    sections: Sequence[str] = (),
    whole: bool = False,
    layout: str | None = None,
    from_file: Sequence[Path] = (),
    of_file: Mapping[str, Any] = _NONE,
    nodes: Nodes | None = None,
    questions: Mapping[str, Any] = _NONE,
    html: Path | None = None,
    trace: Path | None = None,
    ranks: bool = False,
    force: bool = False,
    as_json: bool = False,
    command_line: str = "",
    **workload: Unpack[Workload],
) -> int:
    """Print the explanation of a plan, or of `layout` for MODEL CLUSTER [TRAINING.yaml]; return the exit code.

    sections: names of sections to print in place of the short answer; `whole` prints all of them.
    of_file: keywords of `planner.api.estimate_file` for the files `from_file`.
    questions: keywords of `planner.api.explain_layout` that ask something.
    command_line: the command as the user typed it, which the suggested next command follows.
    html, trace: files for the page and the timeline; with either, only answers to questions are printed.

    Raises:
        PlannerError: as `planner.api.explain_layout`, or an output file exists and `force` is false.
    """
    from planner.api import explain_layout
    from planner.show.explain import answers, explanation, overview, parts_of, section_names
    from planner.show.screen import stack

    if ranks and trace is None:
        raise InputError("--ranks goes with --trace", hint=_HINT)
    to_output = [name for name, path in (("--html", html), ("--trace", trace)) if path and str(path) == "-"]
    if len(to_output) + as_json > 1:
        raise InputError("only one of --html -, --trace - and --json can go to standard output", hint=_HINT)
    check_writable(*(path for path in (html, trace) if str(path) != "-"), force=force)
    names = section_names(sections)
    if names and (whole or as_json):
        raise InputError("--all and --json have every section; name sections without them", hint=_HINT)
    read = console.read_plan(targets[0]) if len(targets) == 1 and not from_file else None
    with console.progress("pricing") as progress:
        if from_file:
            plan = _of_file(from_file, targets, layout, nodes=nodes, reporter=progress, **of_file, **workload)
        else:
            plan = read or _estimate(targets, layout, nodes=nodes, reporter=progress, **workload)
        parts = None if as_json or html or whole else parts_of(names) | {"fitting_changes"}
        found = explain_layout(plan, reporter=progress, parts=parts, **questions)
    if html:
        console.write(html, _page(found), force=force)
    if trace:
        from planner.show.trace import trace_text

        console.write(trace, trace_text(plan, ranks=ranks), force=force)
    if as_json:
        console.print(found.to_json())
    elif not to_output:
        is_asked = any(questions.values())
        is_short = not (names or whole or is_asked or html or trace)
        shown = overview(found) if is_short else explanation(found, names) if names or whole else None
        is_read = from_file and layout is None and plan.fits is not None
        search = _search(command_line, plan, console) if is_read and (is_short or whole or "others" in names) else None
        console.render(stack(shown, search, answers(found) if is_asked else None))
    return ExitCode.OK


def _split(targets: Sequence[str], layout: str | None, *, from_file: bool) -> tuple[Sequence[str], Sequence[str]]:
    """Tell PLAN SECTION ... from MODEL CLUSTER ...: return the documents and the sections.

    The second form needs a layout. Without one a file, or words that all name sections, tell that the first is meant.
    With --from the first word is the cluster.
    """
    from planner.show.explain import SECTIONS

    words = [name for each in targets[1:] for name in each.split(",")]
    is_named = bool(words) and all(name in SECTIONS for name in words)
    is_file = targets[0] == "-" or isfile(targets[0])  # noqa: PTH113 - it accepts names of any length
    is_plan = is_named or (is_file and not from_file)
    return (targets[:1], targets[1:]) if is_plan and layout is None else (targets, ())


def _estimate(targets: Sequence[str], layout: str | None, **others: Any) -> Plan:
    from planner.api import estimate_layout

    if len(targets) > 3:
        raise InputError(f"too many arguments: {shlex.join(targets[3:])}", hint=_HINT)
    if layout is None:
        raise InputError("say which layout to price: --layout tp=8,pp=4,...; `planner plan` chooses one", hint=_HINT)
    return estimate_layout(*targets, layout=layout, **others)


def _of_file(paths: Sequence[Path], targets: Sequence[str], layout: str | None, **others: Any) -> Plan:
    from planner.api import estimate_file

    if len(targets) > 2:
        raise InputError(f"too many arguments: {shlex.join(targets[2:])}", hint="--from FILE goes with CLUSTER alone")
    return estimate_file(paths, *targets, layout=layout or "", **others)


def _search(command_line: str, plan: Plan, console: Console) -> Group:
    """How much faster the fastest layout is than that of the file, and the command that plans it."""
    from planner.answers.what_if import fastest_seconds
    from planner.search.near_ties import slower_by
    from planner.show.screen import Command as Shown
    from planner.show.screen import section

    with console.progress("searching") as progress:
        fastest = fastest_seconds(plan, progress)
    text = shlex.join(["planner", "plan", *shlex.split(_ONLY_HERE.sub("", command_line))[2:]])
    words = "no layout that fits is faster than this one"
    if fastest is not None:
        words = f"the fastest layout is {slower_by(fastest / plan.step_seconds - 1)} than this one"
    return section("Next", Shown(text=text), note=words)


def _page(found: Explanation) -> Iterator[str]:
    """Render the page of an explained plan, only when the first piece is requested."""
    from planner.answers.executed import executed_step
    from planner.answers.plan_inputs import job_of
    from planner.answers.scaling import replicas_of
    from planner.answers.what_if import sensitivity_of
    from planner.show.page.render import page_text

    plan, job = found.plan, job_of(found.plan)
    yield page_text(
        found,
        executed_step(job, plan.layout),
        replicas=replicas_of(plan),
        gains=found.sections.sensitivity or sensitivity_of(plan, search=False),
    )


@click.command("explain", cls=Command)
@click.argument(
    "targets",
    nargs=-1,
    required=True,
    metavar="PLAN [SECTION...] | MODEL CLUSTER [TRAINING.yaml] | --from FILE CLUSTER",
)
@group("Workload", click.option("--layout", metavar="LAYOUT", help="The layout to price, as in tp=8,pp=4,mbs=1."))
@workload_options
@machine_options(ranges=False)
@group(
    "Answer",
    click.option(
        "--section", "sections", multiple=True, metavar="NAME", help="Print this section, as after PLAN; repeat it."
    ),
    click.option("--all", "whole", is_flag=True, help="Print every section, with formulas and sources."),
)
@question_options
@report_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Show what a plan or layout costs, or answer questions about it.

    PLAN is a file that `planner plan -o` wrote, or - for standard input. Without SECTION the answer is short and lists
    the sections, such as memory, time, others or proof. With --html or --trace the result goes only to files, unless
    there is a question to answer. The page contains the answers too. For either option, the file name - means
    standard output.

    With --from the layout comes from a file of another program, and the options in the file are not changed.
    Values that the file does not set are listed as assumed, and options that have no price as not priced. If one of
    these decides whether the plan fits, the verdict is unknown, and --ignore KEY prices the file without it.
    """
    is_foreign = bool(options["from_file"])
    options["model"] = options.pop("from_model")
    of_file, questions = ({name: options.pop(name) for name in names} for names in (_OF_FILE, _QUESTIONS))
    options["targets"], named = _split(options["targets"], options["layout"], from_file=is_foreign)
    options["sections"] += tuple(named)
    if is_foreign:
        if not is_given(ctx, "engine"):
            del options["engine"]  # the foreign file decides the engine
    elif any(of_file.values()):
        raise click.UsageError("--model, --define, --args and --ignore go with --from FILE")
    elif len(options["targets"]) == 1:
        refuse_options(ctx, _OF_LAYOUTS, "a plan is priced already; these go with MODEL CLUSTER")
    return run(console=Console(), command_line=ctx.obj, of_file=of_file, questions=questions, **options)


_OF_PLANS = {"targets", "sections", "whole", *_QUESTIONS, "html", "trace", "ranks", "force", "as_json"}
_OF_LAYOUTS = {param.name for param in command.params} - _OF_PLANS
