"""DIR/status.json, the launcher's verdict: torchrun's exit code does not show whether a stopped run saved its state."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from planner.errors import ExitCode


def write_status(output: Path, state: str, step: int, reason: str = "", **details: Any) -> None:
    """Replace DIR/status.json.

    state: running, done, saved (stopped on request, and can be resumed), diverged or failed.
    """
    draft = output / f".status.{os.getpid()}.tmp"
    draft.write_text(json.dumps({"state": state, "step": step, "reason": reason, **details}) + "\n")
    draft.replace(output / "status.json")


def record_failure(output: Path, reason: str, code: ExitCode, rank: int) -> bool:
    """Write the verdict, unless another rank of this run was faster; returns whether this rank was the first."""
    if not _is_first(output, _mark("failed")):
        return False
    status = output / "status.json"
    step = json.loads(status.read_text())["step"] if status.exists() else 0
    with contextlib.suppress(OSError):  # on a full disk, the message on stderr must suffice
        write_status(output, "failed", step, reason, rank=rank, exit_code=int(code))
    return True


def is_first_loss(output: Path) -> bool:
    """Whether no other rank of this run has failed, or reported a lost rank, before."""
    return not (output / _mark("failed")).exists() and _is_first(output, _mark("lost"))


def forget_failures(output: Path) -> None:
    """Remove the marks of earlier starts, after all ranks have started."""
    for kind in ("failed", "lost"):
        for mark in output.glob(f".{kind}-*"):
            mark.unlink()


def _is_first(output: Path, mark: str) -> bool:
    output.mkdir(parents=True, exist_ok=True)
    try:
        (output / mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _mark(kind: str) -> str:
    """Name of the file by which the first rank that ends in this way tells the other ranks.

    On several hosts the next start reuses the run id, but every start has another port.
    """
    return f".{kind}-{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}-{os.environ.get('MASTER_PORT', '')}"
