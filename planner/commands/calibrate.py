"""`planner calibrate`: fits corrections to the user's own runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import file_option
from planner.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(runs: Sequence[Path], *, output: Path, console: Console, plan: Path | None = None, force: bool = False) -> int:
    """Write corrections fitted to the runs, print forecast errors before and after the fit, and return the exit code.

    Raises:
        PlannerError: as `planner.api.calibrate_runs`, or the output file exists and `force` is false.
    """
    from planner.api import calibrate_runs
    from planner.evidence.fit import calibration_text
    from planner.show.calibrate import calibrated

    to_screen = str(output) == "-"
    check_writable(None if to_screen else output, force=force)
    with console.progress("pricing the runs"):
        calibration, learnt, notes = calibrate_runs(runs, plan=plan)
    for note in notes:
        console.note(note)
    console.write(output, [calibration_text(calibration)], force=force)
    if not to_screen:
        console.render(calibrated(learnt))
    return ExitCode.OK


@click.command("calibrate")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUNS...")
@file_option(
    "--output", "-o", help="Write the corrections here, for --calibration of other commands; - for standard output."
)
@file_option("--plan", metavar="PLAN", help="The plan that the logs ran; by default plan.json beside a log.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.pass_context
def command(ctx: click.Context, /, output: Path | None, **options: Any) -> int:
    """Learn corrections from your own RUNS.

    RUNS are folders of `planner launch`, tables (.csv) with the columns of `planner accuracy`, and logs of
    Megatron-LM, torchtitan, DeepSpeed and Hugging Face Trainer. The corrections start from the shipped
    calibration, and a few runs change them little. `plan`, `explain`, `accuracy` and `launch` read the file with
    --calibration.
    """
    if output is None:
        raise click.UsageError("-o FILE is missing: where the corrections are written", ctx=ctx)
    return run(console=Console(), output=output, **options)
