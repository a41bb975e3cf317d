"""Token files that a run makes from texts: written completely or not at all, and verified at every start."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import zlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from planner.errors import EnvironmentProblem, PlannerError
from planner.trainer.disk import sync, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Encoded: TypeAlias = "Callable[[], Iterator[np.ndarray[Any, Any]]]"

START_VARIABLE: Final = "PLANNER_START"
"""Environment variable that identifies one start of `planner launch`; its first rank verifies a file for all others."""

BYTES_AT_ONCE: Final = 1 << 18


def cached(path: Path, dtype: np.dtype[Any], encoded: Encoded, *, source: str) -> np.ndarray[Any, Any]:
    """The tokens in `path`; `encoded` makes them if the file is missing or damaged.

    The first rank of a start verifies the whole file while the others wait. Without `planner launch` each rank verifies
    it. The checksum is CRC-32, which detects faults of disks and copies in half the time of SHA-256; it does not detect
    deliberate changes.
    source: the text's name in messages.

    Raises:
        EnvironmentProblem: the file cannot be written, or is damaged and its text can no longer be read.
        PlannerError: from `encoded`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _write(path, encoded)
            elif damage := _damage(path):
                sys.stderr.write(f"token cache {path} is damaged: {damage}; making it again from {source}\n")
                _mend(path, encoded, damage=damage, source=source)
            _remember(path)
            return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror or error}") from None


def _record(path: Path) -> Path:
    """The file beside a cache with its length and its checksum."""
    return path.with_name(f"{path.name}.json")


def _mend(path: Path, encoded: Encoded, *, damage: str, source: str) -> None:
    try:
        _write(path, encoded)
    except PlannerError as error:
        raise EnvironmentProblem(
            f"token cache {path} is damaged: {damage}; it cannot be made again: {error.mistakes[0].message}",
            hint=f"make {source} readable, or copy {path.name} and {_record(path).name} from where they are whole",
        ) from None


def _damage(path: Path) -> str:
    """How the file differs from the file that was written; empty if it does not differ."""
    try:
        record = json.loads(_record(path).read_text())
        num_bytes, crc32 = int(record["num_bytes"]), int(record["crc32"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_record(path).name}, which holds its length and its sum, is missing or unreadable"
    try:
        if (found := path.stat().st_size) != num_bytes:
            return f"it has {found:,} bytes of {num_bytes:,}"
        return "" if _is_remembered(path) or _crc32(path) == crc32 else "its bytes are not those that were written"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _crc32(path: Path) -> int:
    total, buffer = 0, memoryview(bytearray(BYTES_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total = zlib.crc32(buffer[:count], total)
    return total


def _remember(path: Path) -> None:
    """Tell the other ranks of this start that the file is intact."""
    if os.environ.get(START_VARIABLE) and not _is_remembered(path):
        path.with_name(f"{path.name}.start").write_text(os.environ[START_VARIABLE])


def _is_remembered(path: Path) -> bool:
    try:
        return path.with_name(f"{path.name}.start").read_text() == os.environ.get(START_VARIABLE)
    except (OSError, ValueError):
        return False


def _write(path: Path, encoded: Encoded) -> None:
    """Write the tokens and their record under temporary names, and rename both when they are on the disk.

    After a crash between the two renames, the file counts as damaged.
    """
    draft, record_draft = path.with_suffix(".tmp"), path.with_suffix(".json.tmp")
    num_bytes, crc32 = 0, 0
    try:
        with draft.open("wb") as file:
            for part in encoded():
                content = part.tobytes()
                num_bytes, crc32 = num_bytes + file.write(content), zlib.crc32(content, crc32)
        sync(draft)
        write_json(record_draft, {"num_bytes": num_bytes, "crc32": crc32})
        record_draft.replace(_record(path))
        draft.replace(path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)
        record_draft.unlink(missing_ok=True)
