"""`planner accuracy`: compares predictions with measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from planner.commands.console import Console
from planner.commands.options import calibration_option, json_option
from planner.errors import ExitCode


def run(runs: Path, *, console: Console, calibration: Path | None = None, as_json: bool = False) -> int:
    """Print how far off the predictions of a table's runs are, and return the exit code.

    Raises:
        PlannerError: the file cannot be read, or is no table of measured runs.
    """
    from planner.evidence.compare.report import report_of, report_to_json
    from planner.show.accuracy import accuracy

    with console.progress("pricing the runs"):
        report = report_of(runs, calibration)
    console.render(report_to_json(report) if as_json else accuracy(report))
    return ExitCode.OK


@click.command("accuracy")
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUNS.csv")
@calibration_option
@json_option
def command(**options: Any) -> int:
    """Compare predictions with the measured runs of a table.

    RUNS.csv has the columns of tests/published/measurements.csv. Cells may be blank. A run that cannot be priced
    is listed with the reason.
    """
    return run(console=Console(), **options)
