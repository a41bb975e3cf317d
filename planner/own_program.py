"""Starts a program of the trainer, where torch is loaded, and returns its answer, which is JSON."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from planner.errors import EnvironmentProblem, ExitCode, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.errors import PlannerError


def answer_of(
    module: str,
    *words: str,
    needs: Sequence[str],
    install: str,
    broken: Callable[[str], PlannerError],
    limit_seconds: float | None = None,
) -> dict[str, Any]:
    """The last line that `python -m planner.trainer.MODULE WORDS` prints.

    broken: makes the error for a program that ends without an answer from its last words.

    Raises:
        InputError: what the program refuses.
        EnvironmentProblem: a package is not installed, or what else the machine lacks.
        PlannerError: `broken`.
    """
    if missing := [each for each in needs if importlib.util.find_spec(each) is None]:
        raise EnvironmentProblem(f"not installed: {', '.join(missing)}", hint=install)
    command = [sys.executable, "-m", f"planner.trainer.{module}", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_seconds)  # noqa: S603 # our own
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise broken(f"no answer after {limit_seconds} s") from None
    except (IndexError, ValueError):
        raise broken((done.stderr.strip().splitlines() or ["it said nothing"])[-1]) from None
    if "error" in found:
        kind = EnvironmentProblem if done.returncode == ExitCode.ENVIRONMENT else InputError
        raise kind(found["error"], hint=found.get("hint", ""))
    return found
