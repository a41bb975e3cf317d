"""`planner check`: compares a run with its plan, and with an earlier run, and fails if it falls behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from planner.commands.console import Console
from planner.commands.options import file_option, json_option
from planner.errors import ExitCode, InputError, Mistake

REASONS = ("slower", "memory", "layout")


def run(
    path: Path,
    *,
    console: Console,
    plan: str,
    row: str = "",
    baseline: Path | None = None,
    fail_on: str = "",
    as_json: bool = False,
) -> int:
    """Print a line for each comparison and return the exit code, which is DIFFERS if one of them fails.

    Raises:
        PlannerError: as `planner.evidence.check.check_run`, or a word of `fail_on` is unknown.
    """
    from planner.evidence.check import Reason, check_run
    from planner.show.check import check_view
    from planner.specs.text import did_you_mean, quoted

    words = [word.strip() for word in fail_on.split(",") if word.strip()]
    if unknown := [word for word in words if word not in REASONS]:
        said = ((f"{quoted(word)} is nothing to fail on", did_you_mean(word, REASONS)) for word in unknown)
        raise InputError(*(Mistake(message=text, where="--fail-on", hint=hint) for text, hint in said))
    asked = [Reason(word) for word in words]
    planned = console.read_plan(plan)
    found = check_run(path, planned, row=row, baseline=baseline, fail_on=asked, tell=console.note)
    console.render(found.model_dump_json(indent=1) + "\n" if as_json else check_view(found))
    return ExitCode.OK if found.passed else ExitCode.DIFFERS


@click.command("check")
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--plan", required=True, metavar="PLAN", help="The plan that the run ran.")
@click.option("--row", default="", metavar="ID", help="The row of a table of runs (.csv).")
@file_option(
    "--baseline",
    metavar="RUN",
    help="An earlier run that this one must keep up with, or a folder of run folders, which tell how far runs differ.",
)
@click.option(
    "--fail-on", default="", metavar="WORDS", help="Of slower, memory and layout, with commas; by default all of them."
)
@json_option
def command(**options: Any) -> int:
    """Check a RUN against its plan; exit code 7 if it fails.

    RUN is a folder of `planner launch`, a folder of several such, a log, or a table of runs. It fails if its step is
    longer than the plan's band, or than the baseline's by more than the baseline's scatter; if its memory is over the
    plan's band; or if another layout ran. A faster run passes.
    """
    return run(console=Console(), **options)
