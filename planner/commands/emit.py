"""`planner emit`: what runs a plan elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.console import Console, run_folder
from planner.commands.options import plan_argument, run_options, with_run_arguments
from planner.errors import ExitCode, InputError

if TYPE_CHECKING:
    from planner.run_arguments import RunArguments


def run(
    plan_path: Path,
    *,
    to: str,
    console: Console,
    arguments: RunArguments,
    output: Path | None = None,
    force: bool = False,
) -> int:
    """Write the script of a target and the plan to the folder `output`, or print it; return the exit code.

    Raises:
        PlannerError: a plan that the target does not run, or files that must not be written.
    """
    from planner.emit.bundle import TARGETS, write_bundle
    from planner.emit.torchrun import check_engine, torchrun_commands

    if str(plan_path) == "-" and to == "torchrun" and output is None:
        raise InputError("the command needs the plan's file", hint="write it first, `planner plan ... -o plan.json`")
    plan = console.read_plan(str(plan_path))
    check_engine(plan, "megatron" if to == "megatron" else "torch")
    if output is not None:
        for path in write_bundle(plan, to, output, arguments=arguments, force=force):
            console.say_written(path)
    elif to == "torchrun":
        lines = torchrun_commands(plan, plan_path, output=run_folder(plan_path), arguments=arguments)
        console.print("".join(f"{line}\n" for line in lines))
    else:
        console.print(TARGETS[to][1](plan, arguments=arguments))
    return ExitCode.OK


@click.command("emit")
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
def command(**options: Any) -> int:
    """Write what runs PLAN elsewhere: a script for torchrun, Slurm or Megatron-LM, and the plan beside it.

    Without -o nothing is written: the script is printed, and for torchrun the command of each host.
    """
    return run(console=Console(), **with_run_arguments(options))
