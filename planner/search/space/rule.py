"""A rule, said once: for arrays of candidates and for the layout of a user, with its fault beside each condition."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from planner.specs.text import any_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from planner.numbers import Flag
    from planner.specs.job import Job

Checks: TypeAlias = "Generator[Flag, bool, Any]"
"""The body of a rule: `if (yield tp > most): return "tp is more than most; lower it"`.

It reads like a function that returns the first fault of one layout: a sentence with the wrong values, a semicolon, and
the legal values or another way out. Each condition goes through `yield`, so that it serves arrays of layouts, too: they
are sent False, and go on to the next condition. A text that is written before its condition would format the arrays.
"""

_MOST_NAMED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition on layouts.

    reads: the keys that the rule reads; the rule applies as soon as they are known.
    needs: the condition in words.
    checks: the rule for a job and the values of these keys (`is_by_key`), or for a job and a layout.
    left_out: layouts that the rule leaves out of the search only, in words, because the search could not price them
    exactly; they can run, and `explain` prices them. Empty for a rule that no layout may break.
    """

    name: str
    reads: tuple[str, ...]
    needs: str
    checks: Callable[..., Checks]
    is_by_key: bool = True
    left_out: str = ""

    def holds(self, job: Job, degrees: Any) -> Flag:
        """Whether each layout of `degrees` meets the rule."""
        broken: Flag = False
        for each in self._checked(job, degrees):
            broken = broken | each
        return np.logical_not(broken)

    def fault(self, job: Job, layout: Any) -> str:
        """What is wrong with a layout, and what would be legal; empty if the layout meets the rule."""
        checks, is_broken = self._checked(job, layout), None
        try:
            while True:
                is_broken = bool(checks.send(is_broken))  # type: ignore[arg-type]  # the first is None
        except StopIteration as end:
            return end.value or ""

    def _checked(self, job: Job, degrees: Any) -> Checks:
        return self.checks(job, *((getattr(degrees, key) for key in self.reads) if self.is_by_key else (degrees,)))


def rule(into: list[Rule], reads: str = "", *, left_out: str = "") -> Callable[[Callable[..., Checks]], Rule]:
    """Make a rule of the function below, and add it to the list `into`.

    The function takes the job and the keys that it reads, or the job and a layout with the keys in `reads`. Its
    docstring is the condition.
    """

    def add(checks: Callable[..., Checks]) -> Rule:
        keys = reads.split() or [*inspect.signature(checks).parameters][1:]
        into.append(
            Rule(
                name=checks.__name__.replace("_", "-"),
                reads=tuple(keys),
                is_by_key=not reads,
                needs=" ".join((checks.__doc__ or "").split()),
                checks=checks,
                left_out=left_out,
            )
        )
        return into[-1]

    return add


def near(values: Iterable[int], asked: int) -> str:
    """As text, the few legal values that are nearest to the value asked for."""
    return any_of(sorted(sorted(values, key=lambda value: abs(value - asked))[:_MOST_NAMED]))
