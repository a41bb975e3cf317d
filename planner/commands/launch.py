"""`planner launch`: trains by a plan, then compares measurement and forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from planner.commands.console import Console, run_folder
from planner.commands.options import (
    Command,
    calibration_option,
    file_option,
    force_unfit_option,
    place_options,
    plan_argument,
    run_options,
    with_run_arguments,
)
from planner.errors import ExitCode, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from planner.run_arguments import RunArguments
    from planner.specs.calibration import Calibration


def run(
    plan_path: Path,
    *,
    console: Console,
    arguments: RunArguments,
    output: Path | None = None,
    dry_run: bool = False,
    calibration: Path | None = None,
    **place: Any,
) -> int:
    """Train by the plan, compare measured with planned figures, and return the exit code.

    output: folder of the run.
    dry_run: print the command of each host and start nothing.
    calibration: a file of corrections that replace the plan's own corrections in the comparison.
    place: as `planner.launch.launch`.

    Raises:
        PlannerError: as `planner.launch.launch`.
    """
    from planner.launch import launch
    from planner.specs.by_name import load_calibration

    corrections = load_calibration(calibration) if calibration else None
    output = output or run_folder(plan_path)
    code = launch(plan_path, output=output, arguments=arguments, dry_run=dry_run, **place)
    if code == ExitCode.OK and not dry_run:
        _show_comparison(output, console, corrections)
    return code


def _show_comparison(output: Path, console: Console, corrections: Calibration | None) -> None:
    """Compare the measurements of the run in `output` with its plan, and print the commands for calibration.

    A run that is too short to learn from has no such commands.
    """
    import json

    from planner.evidence.compare.measured import compare
    from planner.evidence.inputs import read_inputs
    from planner.reading import corrected
    from planner.show.measured import comparison
    from planner.show.summary import learning_commands

    measured = output / "measurements.json"
    if measured.exists():
        plan_of_run = console.read_plan(str(output / "plan.json"))
        if corrections is not None:
            plan_of_run = corrected(plan_of_run, corrections)
        found = compare(plan_of_run, json.loads(measured.read_text(encoding="utf-8")))
        try:
            read_inputs([output], plan=None, tell=lambda _: None)
            commands = learning_commands(output)
        except InputError:
            commands = ()
        console.render(comparison(found, commands))


@click.command("launch", cls=Command)
@plan_argument
@run_options
@place_options
@file_option("--output", metavar="DIR", help="Folder of the run; runs/PLAN by default.")
@calibration_option
@force_unfit_option
@click.option("--smoke", is_flag=True, help="Use mock data, for plans of other programs that have any.")
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS...]")
@click.option("--dry-run", is_flag=True, help="Only print the command of each host.")
def command(**options: Any) -> int:
    """Train by PLAN, then compare the forecast with the measured run.

    If the plan uses several hosts, run this command on each of them, with shared folders. Under Slurm and
    Kubernetes a host finds its own number; elsewhere give --node-rank and --master-addr. For a plan of another
    program, this command starts that program with the files that `planner emit` writes, and passes OPTIONS on to
    it.
    """
    return run(console=Console(), **with_run_arguments(options))
