"""A time limit for a whole search; at the limit, the search ends as after Ctrl-C, with the best layout so far."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEAST_SECONDS = 0.1  # the least time limit of a solver


class OutOfTime(KeyboardInterrupt):
    """The search reached its time limit."""


class TimeLimit:
    """The remaining seconds of a search; None: no limit."""

    def __init__(self, seconds: float | None) -> None:
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
