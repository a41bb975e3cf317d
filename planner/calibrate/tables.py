"""Read a table of runs in the form of `planner accuracy`, and keep the line of each row."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Final

from planner.accuracy.jobs import Unsupported, job_of
from planner.accuracy.learn import Observation
from planner.accuracy.runs import REQUIRED_COLUMNS, run_of
from planner.cost.limits import unpriced
from planner.errors import EnvironmentProblem, InputError
from planner.specs.files import limited_text
from planner.specs.mistakes import Mistakes
from planner.specs.text import printable, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_TIMES: Final = ("measured_step_s", "step_s", "tok_s_gpu")
_COUNTS: Final = ("gpus", "seq", "gbs", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero_stage", "mbs")
"""Columns whose cells must be blank or numbers; otherwise a typing error would silently price another run."""


def read_table(path: Path, tell: Callable[[str], None] = lambda _: None) -> list[Observation]:
    """The rows that were measured and can be priced; `tell` is called with the line and reason of each other row.

    Raises:
        InputError: the file is not a table, columns are missing, or cells are not numbers; all by line.
        EnvironmentProblem: the file cannot be read.
    """
    shown, mistakes = printable(str(path)), Mistakes()
    found = []
    for line, cells in _rows(path, shown):
        if not _check_cells(mistakes, cells, f"{shown}:{line}"):
            continue
        where = f"{shown}:{line}"
        run = run_of(cells, where)
        if run.measured_step_seconds is None:
            tell(f"{where}: no step time, so the row is left out")
            continue
        setup = job_of(run)
        reason = setup.reason if isinstance(setup, Unsupported) else unpriced(setup.job, setup.layout)
        if isinstance(setup, Unsupported) or reason:
            tell(f"{where}: left out, because it cannot be priced: {reason}")
            continue
        measured = run.measured_step_seconds
        found.append(
            Observation(where=where, job=setup.job, layout=setup.layout, measured_seconds=measured, share=setup.share)
        )
    mistakes.raise_if_any()
    return found


def _rows(path: Path, shown: str) -> list[tuple[int, Mapping[str, str]]]:
    """The line number of each row, and its cells by column."""
    try:
        with path.open("rb") as file:
            reader = csv.DictReader(io.StringIO(limited_text(file, shown), newline=""))
            columns = reader.fieldnames or ()
            missing = [name for name in REQUIRED_COLUMNS if name not in columns]
            if missing or not set(_TIMES) & set(columns):
                lacks = ", ".join(missing) or "a step time (step_s, or tok_s_gpu)"
                hint = "the columns are those of tests/published/measurements.csv"
                raise InputError(f"lacks the columns {lacks}", where=f"{shown}:1", hint=hint)
            return [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {shown}: {error.strerror}") from None
    except csv.Error as error:
        raise InputError(f"is not a CSV table: {printable(str(error))}", where=shown) from None


def _check_cells(mistakes: Mistakes, cells: Mapping[str, str], where: str) -> bool:
    before = len(mistakes.found)
    for column in (*_TIMES, *_COUNTS):
        text = (cells.get(column) or "").strip()
        if text and not _is_number(text, whole=column in _COUNTS):
            kind = "a whole number" if column in _COUNTS else "a number above 0"
            mistakes.add(f"column {column}: {quoted(text)} is not {kind}", where, "correct the cell, or leave it blank")
    return len(mistakes.found) == before


def _is_number(text: str, *, whole: bool) -> bool:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return False
    return math.isfinite(value) and (value.is_integer() and value >= 0 if whole else value > 0)
