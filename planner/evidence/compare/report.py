"""All figures of one table of runs, and their JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from planner.evidence.compare.groups import Group, memory_groups, time_groups
from planner.evidence.compare.null_model import null_seconds
from planner.evidence.compare.score import Row, score
from planner.evidence.compare.sweeps import Sweep, sweeps
from planner.evidence.rows.runs import read_runs
from planner.specs.by_name import load_calibration

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Verdicts on published runs; "may not fit" counts as right for both kinds of runs.

    num_oom: number of runs that ran out of memory.
    caught: number of these runs with another verdict than "fits".
    num_ran: number of runs that were measured.
    false_alarms: number of these runs with the verdict "does not fit".
    """

    num_oom: int
    caught: int
    num_ran: int
    false_alarms: int


def outcomes(rows: Iterable[Row]) -> Outcomes:
    """Count the verdicts; rows without a prediction are left out."""
    judged = [row for row in rows if row.fits is not None]
    oom = [row for row in judged if row.run.oom]
    ran = [row for row in judged if not row.run.oom and row.measured_seconds]
    return Outcomes(
        num_oom=len(oom),
        caught=sum(not row.fits for row in oom),
        num_ran=len(ran),
        false_alarms=sum(row.verdict == "does not fit" for row in ran),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows in the order of the table, and the figures computed from them.

    null: index of a row -> seconds of the null model.
    """

    rows: tuple[Row, ...]
    null: dict[int, float]
    groups: tuple[Group, ...]
    memory_groups: tuple[Group, ...]
    outcomes: Outcomes
    sweeps: tuple[Sweep, ...]


def report_of(path: Path, calibration: Path | None = None) -> Report:
    """Read, price and compare every run of a table.

    calibration: a file of corrections to use instead of the shipped corrections.

    Raises:
        InputError: the file is not a table of runs, or the calibration has mistakes.
        EnvironmentProblem: a file cannot be read.
    """
    corrections = load_calibration(calibration) if calibration else None
    rows = tuple(score(run, corrections) for run in read_runs(path))
    null = null_seconds(rows)
    return Report(
        rows=rows,
        null=null,
        groups=time_groups(rows, null),
        memory_groups=memory_groups(rows),
        outcomes=outcomes(rows),
        sweeps=sweeps(rows),
    )


def report_to_json(report: Report) -> str:
    """The report as JSON: seconds and bytes are plain numbers, errors are shares (0.1 is 10 %)."""
    document = {
        "rows": [_row(row) | {"null_step_s": report.null.get(i)} for i, row in enumerate(report.rows)],
        "groups": [asdict(group) for group in report.groups],
        "memory_groups": [asdict(group) for group in report.memory_groups],
        "outcomes": asdict(report.outcomes),
        "sweeps": [asdict(sweep) for sweep in report.sweeps],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _row(row: Row) -> dict[str, Any]:
    return {
        "id": row.run.id,
        "supported": not row.reason,
        "reason": row.reason,
        "measured_step_s": row.measured_seconds,
        "predicted_step_s": row.predicted_seconds,
        "low_step_s": row.low_seconds,
        "high_step_s": row.high_seconds,
        "measured_mem_bytes": row.measured_memory_bytes,
        "predicted_mem_bytes": row.predicted_memory_bytes,
        "predicted_fits": row.fits,
        "predicted_verdict": row.verdict,
        "layout": str(row.setup.layout) if row.setup else None,
        "engine": row.setup.job.engine.name if row.setup else None,
        "assumed": [asdict(each) for each in row.setup.assumed] if row.setup else [],
    }
