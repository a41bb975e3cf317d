"""A limit on the time of a whole search, which ends as Ctrl-C ends it: with the best layout so far."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEAST_SECONDS = 0.1  # that a solver is given to answer


class OutOfTime(KeyboardInterrupt):
    """The time of a search is up."""


class TimeLimit:
    """What is left of the seconds of a search; None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds that are left, and a little where none are, so that a solver can say that its time is up."""
        return None if self._end is None else max(self._end - time.monotonic(), _LEAST_SECONDS)

    @contextmanager
    def ends(self) -> Iterator[None]:
        """Raise `OutOfTime` in what runs inside once the time is up.

        Only the main thread can be ended this way; in another one the limit holds for the solver alone.
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
