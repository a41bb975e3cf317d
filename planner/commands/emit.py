"""`planner emit`: writes the files that run a plan with another program or on other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.commands.console import Console, run_folder
from planner.commands.options import (
    Command,
    file_option,
    force_unfit_option,
    plan_argument,
    run_options,
    with_run_arguments,
)
from planner.emit.programs import PROGRAMS
from planner.emit.starters import STARTERS
from planner.errors import ExitCode, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from planner.emit.bundle import Bundle
    from planner.run_arguments import RunArguments


def run(
    plan_path: Path,
    *,
    console: Console,
    arguments: RunArguments,
    to: str | None = None,
    on: str | None = None,
    output: Path | None = None,
    smoke: bool = False,
    force: bool = False,
    force_unfit: bool = False,
) -> int:
    """Write the files of a program and the plan to the folder `output`, or print them; return the exit code.

    Raises:
        PlannerError: the program cannot run the plan or has no option for one of its values, or a file exists and
            `force` is false.
    """
    from planner.emit.bundle import bundle_of, target_of, write_bundle
    from planner.emit.programs.torch import torchrun_commands
    from planner.emit.target import How

    if str(output) == "-":
        hint = "leave out -o to print them, or name a folder"
        raise InputError("the files of a program go to a folder, not to standard output", where="-o", hint=hint)
    if str(plan_path) == "-" and to == "torchrun" and output is None:
        raise _needs_a_file()
    if to in STARTERS:  # older command lines, in which --to also named starters
        to, on = "torch", on or to
    plan = console.read_plan(str(plan_path))
    how = How(arguments=arguments, smoke=smoke)
    if output is not None:
        paths, made = write_bundle(
            plan, output, to, on or "torchrun", how=how, force=force, force_unfit=force_unfit, tell=console.note
        )
        for path in paths:
            console.say_written(path)
        _say_yours(console, made)
        return ExitCode.OK
    made = bundle_of(plan, to, on or "torchrun", how=how, force_unfit=force_unfit, tell=console.note)
    if target_of(plan, to).name == "torch" and on in (None, "torchrun"):
        if str(plan_path) == "-":
            raise _needs_a_file()
        console.print(torchrun_commands(plan, plan_path, output=run_folder(plan_path), arguments=arguments))
    elif len(made.texts) == 1:
        console.print(made.texts[made.script])
    else:
        console.print("\n".join(f"# --- {name}\n{text}" for name, text in made.texts.items()))
    _say_yours(console, made)
    return ExitCode.OK


def _needs_a_file() -> InputError:
    return InputError("the command needs the plan's file", hint="write it first, `planner plan ... -o plan.json`")


def _say_yours(console: Console, made: Bundle) -> None:
    """List the values that the plan does not decide: placeholders in the files, then defaults."""
    for placeholder, meaning in made.still_yours.items():
        console.err.write(f"still yours: {placeholder}, {meaning}\n")
    for advice in made.advice:
        console.err.write(f"still yours: {advice}\n")


@click.command("emit", cls=Command)
@plan_argument
@click.option(
    "--to",
    type=click.Choice([*PROGRAMS, *STARTERS]),
    help="The program that will train; by default the program that the plan was made for.",
)
@click.option(
    "--on", type=click.Choice([*STARTERS]), help="The program that starts it on the hosts; torchrun by default."
)
@file_option("-o", "--output", metavar="DIR", help="Write the files and the plan to this folder.")
@click.option("--smoke", is_flag=True, help="Fill in mock data, if the program has any, so that it runs at once.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@force_unfit_option
@run_options
def command(**options: Any) -> int:
    """Write the files that run PLAN with a program or on a cluster.

    The files are the configuration of the program, a script that starts it, and the plan. Without -o nothing is
    written: the files are printed, or for our own trainer the command of each host. Values that the plan does not
    decide, such as data, are placeholders that the program refuses. Standard error lists them.
    """
    return run(console=Console(), **with_run_arguments(options))
