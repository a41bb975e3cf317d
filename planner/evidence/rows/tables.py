"""Read a table of runs in the form of `planner accuracy`, and keep the line of each row."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from planner.cost.limits import unpriced
from planner.errors import InputError
from planner.evidence.rows.jobs import Setup, Unsupported, job_of
from planner.evidence.rows.observation import Observation, faults_of
from planner.evidence.rows.runs import Run, read_cells, run_of, unread_cells
from planner.specs.by_name import engine_names
from planner.specs.mistakes import Mistakes
from planner.specs.text import did_you_mean, printable, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_TIMES: Final = ("measured_step_s", "step_s", "tok_s_gpu")
_POLICIES: Final = ("", "none", "selective", "full")
_CORRECT: Final = "correct the cell, or leave it blank"


def read_table(path: Path, tell: Callable[[str], None] = lambda _: None) -> list[Observation]:
    """The rows that were measured and can be priced.

    tell: called with the line and the reason of each row that is left out, and with the values that were assumed.

    Raises:
        InputError: the file is not a table, columns are missing, or cells cannot be read; all by line.
        EnvironmentProblem: the file cannot be read.
    """
    shown, mistakes = printable(str(path)), Mistakes()
    found: list[Observation] = []
    assumed: dict[tuple[str, str, str], list[int]] = {}
    alike: dict[frozenset[tuple[str, str]], list[int]] = {}
    columns, written = read_cells(path)
    _check_columns(columns, f"{shown}:1")
    for line, cells in written:
        where = f"{shown}:{line}"
        run = run_of(cells, where)
        if not _check_cells(mistakes, cells, run, where):
            continue
        setup, measured = job_of(run), run.measured_step_seconds
        if reason := _left_out(run, setup):
            tell(f"{where}: left out, because {reason}")
            continue
        assert isinstance(setup, Setup)
        assert measured is not None
        alike.setdefault(frozenset((key, cell) for key, cell in cells.items() if key != "id"), []).append(line)
        for each in setup.assumed:
            assumed.setdefault((each.key, each.value, each.rule), []).append(line)
        observed = Observation(
            where=where, job=setup.job, layout=setup.layout, measured_seconds=measured, share=setup.share
        )
        impossible, doubtful = faults_of(observed)
        if impossible:
            mistakes.add(impossible, where, "give seconds in step_s, or tokens per second and device in tok_s_gpu")
        if doubtful:
            tell(f"{where}: {doubtful}")
        found.append(observed)
    for (key, value, rule), lines in assumed.items():
        rows = f"{len(lines)} rows from line {lines[0]} on" if len(lines) > 1 else f"line {lines[0]}"
        tell(f"{shown}: {key}={value} is assumed in {rows}: {rule}")
    for lines in alike.values():
        if len(lines) > 1:
            tell(f"{shown}:{lines[0]}: {len(lines)} rows are equal to this one but for `id`; each counts as a run")
    mistakes.raise_if_any()
    return found


def row_of(path: Path, name: str) -> tuple[str, Run]:
    """The place and the cells of the row of a table with this id.

    Raises:
        InputError: the file is not a table, or has no such row or several.
        EnvironmentProblem: the file cannot be read.
    """
    shown, mistakes = printable(str(path)), Mistakes()
    written = [(f"{shown}:{line}", cells) for line, cells in read_cells(path)[1]]
    rows = [(where, cells) for where, cells in written if (cells.get("id") or "").strip() == name]
    if len(rows) != 1 or not name:
        known = did_you_mean(name, [cells.get("id") or "" for _, cells in written], otherwise="--row ID names one row")
        count = "no row" if not rows else f"{len(rows)} rows"
        raise InputError(f"{count} with the id {quoted(name)}", where=shown, hint=known)
    where, cells = rows[0]
    run = run_of(cells, where)
    _check_cells(mistakes, cells, run, where)
    mistakes.raise_if_any()
    return where, run


def _left_out(run: Run, setup: Setup | Unsupported) -> str:
    """Why nothing can be learnt from a row; empty if something can."""
    if run.measured_step_seconds is None:
        return "it has no step time"
    if isinstance(setup, Unsupported):
        return f"it cannot be priced: {setup.reason}"
    if setup.unknown_framework:
        known = did_you_mean(run.framework, engine_names(), otherwise="`planner engines` lists them")
        return f"framework {quoted(run.framework) if run.framework else '(blank)'} is not known; {known}"
    reason = unpriced(setup.job, setup.layout)
    return f"it cannot be priced: {reason}" if reason else ""


def _check_columns(columns: Sequence[str], where: str) -> None:
    hint = "the columns are those of RUNS.csv in docs/formats.md"
    if not set(_TIMES) & set(columns):
        raise InputError("lacks a column of step times: step_s, or tok_s_gpu", where=where, hint=hint)
    if twice := [name for name, count in Counter(filter(None, columns)).items() if count > 1]:
        raise InputError(f"has the columns {', '.join(twice)} more than once", where=where, hint=hint)


def _check_cells(mistakes: Mistakes, cells: Mapping[Any, Any], run: Run, where: str) -> bool:
    """Whether every cell can be read; otherwise a typing error would silently price another run."""
    before = len(mistakes.found)
    for column, kind in unread_cells(cells).items():
        mistakes.add(f"column {column}: {quoted(cells[column].strip())} is not {kind}", where, _CORRECT)
    for column in _TIMES:
        if getattr(run, column, None) == 0:
            mistakes.add(f"column {column}: 0 is not a time", where, _CORRECT)
    if run.zero_stage is not None and run.zero_stage > 3:
        mistakes.add(f"column zero_stage: there is no stage {run.zero_stage}", where, "0, 1, 2 or 3")
    if run.recompute_policy.lower() not in _POLICIES:
        hint = did_you_mean(run.recompute_policy, _POLICIES[1:], otherwise="none, selective or full")
        mistakes.add(f"column recompute_policy: {quoted(run.recompute_policy)} is no policy", where, hint)
    if None in cells:
        mistakes.add("the row has more cells than the header", where, "quote cells that contain the separator")
    return len(mistakes.found) == before
