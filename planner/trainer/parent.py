"""No orphans: a process that trains ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "PLANNER_PARENT_PID"
"""Names the parent to its child: one that ended while the child was still starting cannot be asked any more."""

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; orphans would train on and write checkpoints.

    Processes that this one starts are told that it is their parent.
    """
    named = os.environ.get(PARENT_VARIABLE)
    parent = int(named) if named and int(named) != os.getpid() else os.getppid()  # own: called twice
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
