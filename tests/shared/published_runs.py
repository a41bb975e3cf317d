"""The published runs, read once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from planner.evidence.rows.runs import Run, read_runs

PUBLISHED = Path(__file__).parents[1] / "published" / "measurements.csv"


@cache
def published_runs() -> tuple[Run, ...]:
    """Every row of tests/published/measurements.csv, in its order."""
    return tuple(read_runs(PUBLISHED))
