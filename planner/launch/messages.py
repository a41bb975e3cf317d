"""What a launcher tells its user while it runs."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Tell the user, on standard error."""
    sys.stderr.write(f"planner launch: {message}\n")
