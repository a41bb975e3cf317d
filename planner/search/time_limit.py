"""A time limit for a whole search; at the limit, the search ends as after Ctrl-C, with the best layout so far."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from planner.errors import InputError
from planner.units import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEAST_SECONDS = 0.1  # the least time limit of a solver
_MOST_SECONDS = parse_quantity("365 d", "seconds")


class OutOfTime(KeyboardInterrupt):
    """The search reached its time limit."""


class TimeLimit:
    """The remaining seconds of a search; None: no limit.

    Raises:
        InputError: the limit is not positive, not a number, or longer than a year.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not 0 < seconds <= _MOST_SECONDS:
            hint = "seconds, at most a year; without it the search has no limit"
            raise InputError(f"{seconds:g} s is no time limit", where="--time-limit", hint=hint)
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """The remaining seconds.

        The result is at least `_LEAST_SECONDS`, so that a solver can report the time limit.
        """
        return None if self._end is None else max(self._end - time.monotonic(), _LEAST_SECONDS)

    @contextmanager
    def ends(self) -> Iterator[None]:
        """Raise `OutOfTime` inside the `with` block at the time limit.

        Only the main thread can be interrupted this way; in another thread the limit applies to the solver alone.
        """
        if self.left is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, self.left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _out_of_time(_number: int, _frame: object) -> NoReturn:
    raise OutOfTime
