"""Errors that a user can cause and fix, and the exit code for each kind of error.

A `PlannerError` is shown as one message without a traceback. Any other exception that escapes is a bug and is shown
with its traceback (exit code 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """The exit codes of every command (docs/decisions.md, 107)."""

    OK = 0
    BUG = 1
    BAD_INPUT = 2
    NOTHING_FITS = 3
    SOLVER = 4
    ENVIRONMENT = 5
    RANK_FAILED = 6
    DIFFERS = 7
    DIVERGED = 17
    PREEMPTED = 75
    INTERRUPTED = 130
    TERMINATED = 143


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake in the input, with its place and a hint."""

    message: str
    where: str = ""  # "file:line:column", or the command-line option
    hint: str = ""
    source_line: str = ""  # the user's own line, shown under the message
    rule: str = ""  # the broken rule alone, if the message says more

    def text(self) -> str:
        """The mistake as plain text of one to three lines."""
        head = f"{self.where}: {self.message}" if self.where else self.message
        quoted = f"\n    {self.source_line.strip()}" if self.source_line.strip() else ""
        help_ = f"\n    help: {self.hint}" if self.hint else ""
        return head + quoted + help_


class PlannerError(Exception):
    """One or more mistakes that the user can fix; `mistakes` holds every mistake found, not just the first."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, *mistakes: Mistake | str, hint: str = "", where: str = "") -> None:
        self.mistakes = tuple(
            Mistake(message=each, hint=hint, where=where) if isinstance(each, str) else each for each in mistakes
        )
        super().__init__("\n".join(mistake.text() for mistake in self.mistakes))

    def at(self, where: str, place: str) -> Self:
        """The same mistakes, with every mistake at `where` moved to `place`."""
        return type(self)(*(replace(each, where=place) if each.where == where else each for each in self.mistakes))


class InputError(PlannerError):
    """A document, an option or a layout cannot be used as it is."""


class NothingFitsError(PlannerError):
    """The input is valid, and no layout fits into memory."""

    exit_code = ExitCode.NOTHING_FITS


class SolverTrouble(PlannerError):
    """The solver failed and no other method could answer."""

    exit_code = ExitCode.SOLVER


class EnvironmentProblem(PlannerError):
    """The environment prevents the work: the disk, a permission, a missing library or a missing device."""

    exit_code = ExitCode.ENVIRONMENT
