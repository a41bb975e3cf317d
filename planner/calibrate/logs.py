"""Logs of training programs: lines that tell a step's time, by program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import InputError
from planner.specs.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from planner.calibrate.steps import Step
    from planner.plan import Plan


def read_log(path: Path, text: str, plan: Plan) -> list[Step]:  # noqa: ARG001
    """The steps that a log tells of.

    Raises:
        InputError: no line of it is of a program that is known.
    """
    raise InputError("no line tells a step's time", where=printable(str(path)), hint="known: run folders and tables")
