"""Which bytes a run trains on: its data files as they were when it began, compared whenever it goes on.

Launcher and trainer read the record, so neither torch nor NumPy is imported here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from planner.errors import EnvironmentProblem, InputError
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HUGGING_FACE: Final = "hf:"
"""Prefix of a data set of the Hugging Face hub; other sources are files."""

RECORD: Final = "data.json"
"""File of a run's folder with the data files that the run began with."""

WHOLE_BYTES: Final = 2**30
"""Largest file whose bytes are all hashed."""

END_BYTES: Final = 2**26
NUM_BLOCKS: Final = 1024
BLOCK_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file at one moment.

    seen: times of the last change of content and of inode in nanoseconds, and the inode. While they and the size stay,
        nobody has written to the file, because no program can set the second time.
    """

    name: str
    num_bytes: int
    sha256: str
    seen: list[int]


def data_files(names: Iterable[str], folder: Path | None) -> list[DataFile]:
    """The files among the sources of a run, as they are now.

    folder: the run's; a file that is as its record says is not read again.

    Raises:
        OSError: a file cannot be read.
    """
    known = (folder and _read_record(folder)) or []
    return [_data_file(name, known) for name in names if not name.startswith(HUGGING_FACE)]


def confirmed(names: Iterable[str], folder: Path) -> list[DataFile]:
    """The data files of a run, which are those that it began with.

    Raises:
        InputError: a file has changed since the run began.
        EnvironmentProblem: a file cannot be read.
    """
    try:
        files = data_files(names, folder)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {printable(str(error.filename))}: {error.strerror}") from None
    before = _read_record(folder)
    if before is not None and (change := _change(before, files)):
        hint = "bring the data back as they were, or train on these in a run of their own, with another --output"
        raise InputError(change, hint=hint)
    return files


def write_record(files: Sequence[DataFile], folder: Path) -> None:
    """Record the data files of a run; another process may read the record at any moment.

    Raises:
        EnvironmentProblem: the folder cannot be written.
    """
    draft = folder / f".{RECORD}.tmp"
    try:
        draft.write_text(json.dumps([asdict(each) for each in files], indent=1) + "\n")
        draft.replace(folder / RECORD)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {folder / RECORD}: {error.strerror}") from None


def _read_record(folder: Path) -> list[DataFile] | None:
    """The data files that a run began with; None if the folder has no record, as before a run's first start."""
    try:
        return [DataFile(**each) for each in json.loads((folder / RECORD).read_text())]
    except (OSError, ValueError, TypeError):
        return None


def _data_file(name: str, known: Iterable[DataFile]) -> DataFile:
    status = Path(name).stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would wait for its writer
        raise OSError(errno.EINVAL, "it is no regular file", name)
    size, seen = status.st_size, [status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    same = (each for each in known if (each.name, each.num_bytes, each.seen) == (name, size, seen))
    return next(same, None) or DataFile(name=name, num_bytes=size, sha256=_digest(Path(name), size), seen=seen)


def _digest(path: Path, num_bytes: int) -> str:
    """SHA-256 of a file; of a large one, of both ends and of blocks that are spread evenly between them."""
    with path.open("rb") as file:
        if num_bytes <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        between, total = num_bytes - 2 * END_BYTES, hashlib.sha256()
        blocks = [(END_BYTES + number * between // NUM_BLOCKS, BLOCK_BYTES) for number in range(NUM_BLOCKS)]
        for start, length in ((0, END_BYTES), *blocks, (num_bytes - END_BYTES, END_BYTES)):
            file.seek(start)
            total.update(file.read(length))
        return total.hexdigest()


def _change(before: Sequence[DataFile], now: Sequence[DataFile]) -> str:
    """What has changed between two records, in words; empty if the bytes are the same."""
    if len(before) != len(now):
        return f"the run began with {len(before)} data files, and {len(now)} are given"
    for old, new in zip(before, now, strict=True):
        name, size = printable(new.name), new.num_bytes
        if size != old.num_bytes:
            how = "cut" if size < old.num_bytes else "extended"
            return f"{name} was {how} since the run began: from {old.num_bytes:,} to {size:,} bytes"
        if new.sha256 != old.sha256:
            return f"{name} holds other bytes than when the run began, though as many: {size:,}"
    return ""
