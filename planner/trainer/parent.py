"""End a training process when the process that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "PLANNER_PARENT_PID"
"""Environment variable with the parent's process id, in case the parent ends while its child is still starting."""

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; otherwise it would continue to train and write checkpoints.

    The function also puts this process's id into `PARENT_VARIABLE`, where child processes look for their parent's id.
    """
    named = os.environ.get(PARENT_VARIABLE)
    parent = int(named) if named and int(named) != os.getpid() else os.getppid()  # its own id: the second call
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
