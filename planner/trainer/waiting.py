"""Waiting times of a rank by cause, from samples of its main thread.

A collective on a CPU blocks the thread that calls it. FSDP2, DTensor and the pipeline schedules also block, and have no
hooks around their waits. A second thread therefore samples the main thread's call stack every two milliseconds: the
innermost frame shows whether the thread communicates, and the frames around it show why. On a GPU the host does not
wait, so the samples show nothing.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from planner.cost.ledger import LineName

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from planner.layout import Layout

SECONDS_BETWEEN_SAMPLES: Final = 0.002
_COLLECTIVES: Final = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")
_OPERATORS: Final = "torch/_ops.py"  # the file that calls operators by name
_ASKED_BY: Final = (
    ("trainer/context_parallel.py", LineName.CP_COMM),
    ("trainer/expert_parallel.py", LineName.EP_COMM),
    ("trainer/cross_entropy.py", LineName.TP_COMM),
    ("distributed/fsdp/", LineName.DP_COMM),
    ("distributed/_functional_collectives.py", LineName.TP_COMM),  # DTensor's
    ("distributed/pipelining/", LineName.BUBBLE),
)
"""Part of the path of a file that calls collectives -> the line of the ledger."""


class WaitSampler:
    """Seconds for which the main thread waited for communication, by ledger line.

    num_steps: number of watched blocks.
    seconds: sum over these blocks; waits of a stage for its neighbours, transfers included, count as bubble.
    """

    def __init__(self, layout: Layout) -> None:
        self.num_steps = 0
        self.seconds: defaultdict[LineName, float] = defaultdict(float)
        self._watched = threading.main_thread().ident
        # ranks meet once more at the end of a step: the first ranks wait for the ranks that had more to do
        split_ways = ((layout.pp, LineName.BUBBLE), (layout.dp * layout.cp, LineName.DP_COMM))
        self._at_the_end = next((line for degree, line in split_ways if degree > 1), LineName.TP_COMM)
        self._of_function = {"_agree": self._at_the_end, "_add_tied_gradients": LineName.TIED_EMBEDDING}
        self._of_function["over_sequence"] = LineName.CP_COMM if layout.cp > 1 else LineName.TP_COMM

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Sample the step inside the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(ended,), name="samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.num_steps += 1

    def _sample(self, ended: threading.Event) -> None:
        """Add the time since the last sample to the thread's present activity."""
        before = time.perf_counter()
        while not ended.wait(SECONDS_BETWEEN_SAMPLES):
            frame = sys._current_frames().get(self._watched or 0)  # noqa: SLF001 # the documented way to other threads
            line = self.line_of(frame) if frame is not None else None
            now = time.perf_counter()
            if line is not None:
                self.seconds[line] += now - before
            before = now

    def line_of(self, frame: FrameType) -> LineName | None:
        """The ledger line of the communication in a call stack; None while the thread computes."""
        if not _communicates(frame):
            return None
        around: FrameType | None = frame
        while around is not None:
            path = around.f_code.co_filename
            line = next((line for part, line in _ASKED_BY if part in path), None)
            line = line or self._of_function.get(around.f_code.co_name)
            if line is not None:
                return line
            around = around.f_back
        return None


def _communicates(frame: FrameType) -> bool:
    """Whether the innermost frame runs a collective, or waits for an earlier one.

    The collectives' file also runs the operators of an unfinished tensor, in `__torch_dispatch__`.
    """
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.endswith(_OPERATORS):
        caller = caller.f_back
    if caller is None:
        return False
    path = caller.f_code.co_filename
    if path.endswith(_COLLECTIVES):
        return caller.f_code.co_name != "__torch_dispatch__"
    return "/distributed/" in path and ".wait()" in linecache.getline(path, caller.f_lineno or 0)
