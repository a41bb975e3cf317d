"""Messages of a launcher to its user during a run."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Write a message to standard error."""
    sys.stderr.write(f"planner launch: {message}\n")
