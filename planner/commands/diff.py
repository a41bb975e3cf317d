"""`planner diff`: compares two plans."""

from __future__ import annotations

from typing import Any

import click

from planner.commands.console import Console
from planner.commands.options import json_option
from planner.errors import ExitCode, InputError


def run(before: str, after: str, *, console: Console, as_json: bool = False, exit_code: bool = False) -> int:
    """Print the differences between the plans in two files and return the exit code.

    exit_code: whether plans that differ give DIFFERS, as `git diff --exit-code` does.

    Raises:
        PlannerError: a file cannot be read, or holds no plan.
    """
    from planner.answers.difference import difference_of, difference_view

    if before == after == "-":
        raise InputError("only one plan can come from standard input", hint="write the other one to a file")
    found = difference_of(console.read_plan(before), console.read_plan(after))
    console.render(found.model_dump_json(indent=1) + "\n" if as_json else difference_view(found, names=("A", "B")))
    return ExitCode.DIFFERS if exit_code and found.differs else ExitCode.OK


@click.command("diff")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--exit-code", is_flag=True, help="Exit with 7 if the plans differ.")
@json_option
def command(**options: Any) -> int:
    """Compare plan B with plan A: inputs, layout, every line.

    A and B are files that `planner plan -o` wrote. One of them may be - for standard input. The lines are those of
    time and memory.
    """
    return run(console=Console(), **options)
