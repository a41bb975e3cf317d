"""A sign of life for `planner launch`, which ends a rank that hangs.

A collective that never ends does not show which of its ranks hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECONDS_BETWEEN_BEATS = 2.0


@contextlib.contextmanager
def heartbeat(output: Path, rank: int) -> Iterator[None]:
    """Touch DIR/heartbeats/rank-N every two seconds inside the block.

    The file has the host's name and the process id.
    """
    path = output / "heartbeats" / f"rank-{rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{os.uname().nodename} {os.getpid()}\n")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(SECONDS_BETWEEN_BEATS):
            with contextlib.suppress(OSError):  # the disk is full, or the launcher removed the file
                path.touch()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)
