"""Count right and wrong verdicts on whether runs fit, for published runs that did or did not run out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from planner.evidence.compare.score import Row


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
