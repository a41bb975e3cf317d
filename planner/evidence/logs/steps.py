"""Select the step times of a log that can be used, and report the steps that were left out."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from planner.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

WARMUP_STEPS: Final = 2
"""Number of steps left out after each start, because of compilation, cold caches and memory allocation."""

FEWEST_STEPS: Final = 3

_DEVIATIONS: Final = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""

_FEW: Final = 3
_SAME_TIME: Final = 0.1
"""Largest relative difference of the times of one step on two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a log with the time of a step.

    number: the number of the step in the log.
    line, column: position of the time in the file, from 1.
    loss: nan if the loss is not finite, None if the line has no loss.
    covers: number of steps over which the time is the mean.
    rank: mark of the process that wrote the line; empty if the line has none.
    """

    number: int
    seconds: float
    line: int
    column: int = 1
    loss: float | None = None
    covers: int = 1
    rank: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The median step of a log, and notes for the reader about it; scatter: of the steps, as a share of the median."""

    seconds: float
    scatter: float = 0.0
    notes: tuple[str, ...] = ()


def step_time(steps: Sequence[Step], name: str) -> StepTime:
    """The median step time, without warm-up steps and without steps whose loss is not finite.

    A smaller step number than the previous one means a restart, with its own warm-up, unless another rank logged the
    same step.

    Raises:
        InputError: a line has an impossible time, or the log has too few steps.
    """
    for each in steps:
        if not (math.isfinite(each.seconds) and each.seconds > 0):
            hint = "cut the line out, or give a log of a run that went well"
            where = f"{name}:{each.line}:{each.column}"
            raise InputError(f"step {each.number} took {each.seconds} seconds", where=where, hint=hint)
    steps = _of_one_rank(steps)
    starts = [i for i, each in enumerate(steps) if i == 0 or each.number < steps[i - 1].number]
    warm = {i for start in starts for i in range(start, start + WARMUP_STEPS)}
    broken = {i for i, each in enumerate(steps) if each.loss is not None and not math.isfinite(each.loss)}
    kept = [each for i, each in enumerate(steps) if i not in broken and (each.covers > 1 or i not in warm)]
    counted = sum(each.covers for each in kept)
    if counted < FEWEST_STEPS:
        count = f"{counted} of {sum(each.covers for each in steps)} logged steps count"
        count += f", after {WARMUP_STEPS} of warm-up for each start"
        lost = f" and without {len(broken)} whose loss is not finite" if broken else ""
        raise InputError(f"{count}{lost}", where=name, hint=f"log at least {WARMUP_STEPS + FEWEST_STEPS} steps")
    notes = []
    if len(starts) > 1:
        lines = ", ".join(str(steps[i].line) for i in starts[1:4])
        notes.append(f"{name}: started again {len(starts) - 1} times (line {lines}); each start has its own warm-up")
    if broken:
        first = min(broken)
        notes.append(
            f"{name}:{steps[first].line}: {len(broken)} steps without a finite loss, from step {steps[first].number} "
            "on, are left out"
        )
    if missing := _num_missing(steps):
        notes.append(f"{name}: {missing} steps between the first and the last are not in the log")
    if len(steps) == 1:
        notes.append(f"{name}:{steps[0].line}: a mean of {steps[0].covers} steps is all that the log has")
    seconds = statistics.median(each.seconds for each in kept)
    apart = statistics.median(abs(each.seconds - seconds) for each in kept)
    scatter = _DEVIATIONS * apart / seconds
    return StepTime(seconds=seconds, scatter=scatter, notes=tuple(notes))


def _of_one_rank(steps: Sequence[Step]) -> list[Step]:
    """The steps without those that other ranks logged too, perhaps some lines later.

    A step is another rank's if its number was logged since the last start, by a process with another mark, or as the
    last or one of the last few with nearly the same time.
    """
    found: list[Step] = []
    since: dict[int, Step] = {}
    for each in steps:
        same = since.get(each.number)
        if same and (each.number == found[-1].number or _is_copy(each, same, found[-_FEW:])):
            continue
        if found and each.number < found[-1].number:
            since = {}
        found.append(each)
        since[each.number] = each
    return found


def _is_copy(step: Step, same: Step, last: Sequence[Step]) -> bool:
    if step.rank and same.rank and step.rank != same.rank:
        return True
    return same in last and abs(step.seconds / same.seconds - 1) < _SAME_TIME


def _num_missing(steps: Sequence[Step]) -> int:
    """Number of missing steps in a log, not counting the steps that its regular interval skips."""
    if any(each.covers > 1 for each in steps):
        return 0
    gaps = [b.number - a.number for a, b in pairwise(steps) if b.number > a.number]
    interval = statistics.mode(gaps) if gaps else 1
    return sum(gap - interval for gap in gaps if gap > interval)
