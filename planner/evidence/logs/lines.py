"""Read log files line by line: text, or text in gzip."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from planner.errors import EnvironmentProblem, InputError
from planner.specs.files import kind_of
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

LONGEST: Final = 4096
"""Longest line in characters; the rest of a longer line is not read."""

MOST: Final = 2**29
"""Characters of a log, packed or not, in which each line counts as at least `_LEAST`; reading them takes seconds."""

_LEAST: Final = 128

_HEAD: Final = 2**17
"""Bytes in which a plan or a binary file can be recognised."""

_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours, deleted lines and moves of the cursor (ECMA-48, control sequences)."""

_NO_LOG: Final = {
    "a plan": "give the log of its run and --plan {path}, or the folder of `planner launch`",
    "a script": "give the log that its run wrote and --plan PLAN, or a table of runs (.csv)",
}


class Line(NamedTuple):
    """A line as a terminal shows it; number: from 1; start: its first character, after carriage returns, from 0."""

    number: int
    start: int
    text: str


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """An open log, which is read only once, so that it can be a pipe; bytes that are not UTF-8 are replaced.

    Raises:
        InputError: the file is a plan, a script, binary, or damaged.
        EnvironmentProblem: the file cannot be read.
    """
    shown = printable(str(path))
    try:
        with io.BufferedReader(path.open("rb", buffering=0), _HEAD) as file:
            plain = file.peek()[:2] != b"\x1f\x8b"
            stream = file if plain else gzip.GzipFile(fileobj=file)
            head = stream.peek(_HEAD)
            is_utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            if b"\0" in head and not is_utf16:
                hint = "give the text that the training program printed; gzip is read too"
                raise InputError(f"{shown} is binary, and no log", where=f"{shown}:1", hint=hint)
            if kind := kind_of(path.name, head.decode(errors="replace")):
                hint = _NO_LOG[kind].format(path=shown)
                raise InputError(f"{shown} is {kind}, and holds no times of steps", hint=hint)
            yield io.TextIOWrapper(stream, "utf-16" if is_utf16 else "utf-8-sig", errors="replace", newline="")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{shown} is a damaged gzip file", hint="unpack what is left of it: zcat") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {shown}: {error.strerror}") from None


def lines_of(file: TextIO, name: str = "the log") -> Iterator[Line]:
    """The lines of a stream that keeps its line ends (`newline=""`), without control sequences.

    A progress bar returns to the start of its line, so a carriage return ends a line, but not its number.

    Raises:
        InputError: the log, which messages call `name`, is longer than `MOST`, as a small file in gzip can be.
    """
    number, start, begins, left = 1, 0, True, MOST
    while piece := file.readline(LONGEST):
        left -= max(len(piece), _LEAST)
        if left < 0:
            hint = "give the part with the times of steps, as `grep` or `tail` cut it out"
            raise InputError(f"{name} is longer than {MOST:,} characters, or has too many lines", hint=hint)
        ends = piece.endswith(("\r", "\n"))
        if begins:  # a number may be cut at the end of a long line
            text = piece if ends or len(piece) < LONGEST else piece.rpartition(" ")[0]
            yield Line(number, start, _CONTROL.sub("", text.rstrip("\r\n")))
        begins, start = ends, start + len(piece)
        if piece.endswith("\n"):
            number, start = number + 1, 0
