"""Streams that a command reads and writes: this process's streams, or buffers in a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from planner.errors import EnvironmentProblem, InputError
from planner.specs.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from planner.plan import Plan
    from planner.show.progress import Progress


class Console:
    """Results are written to `out`, all other text to `err`; a plan named `-` is read from `source`."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, source: TextIO | None = None) -> None:
        self.out, self.err, self.source = out or sys.stdout, err or sys.stderr, source or sys.stdin

    def print(self, text: str) -> None:
        """Write a result; characters outside the terminal's encoding are escaped and raise no error."""
        encoding = self.out.encoding or "utf-8"
        self.out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self.out.flush()

    def render(self, renderable: RenderableType) -> None:
        """Write a result to `out`: a renderable is laid out for the screen, a string is written unchanged."""
        from planner.show.screen import Screen, to_text

        self.print(renderable if isinstance(renderable, str) else to_text(renderable, Screen.of(self.out)))

    def progress(self, first: str = "listing layouts") -> Progress:
        """Return a context manager that shows the progress of a search on `err`."""
        from planner.show.progress import Progress

        return Progress(self.err, first)

    def read_plan(self, name: str) -> Plan:
        """Read a plan from a file, or from `source` if the name is `-`."""
        from planner.reading import read_plan

        return read_plan(Path(name), source=self.source, tell=self.note)

    def note(self, text: str) -> None:
        """Write a note about the input to `err`."""
        self.err.write(f"note: {text}\n")

    def write(self, path: Path, pieces: Iterable[str], *, force: bool) -> None:
        """Write a file and report its name on `err`; for `-` write the text to `out` as a result."""
        from planner.plan import write_text
        from planner.show.screen import clean

        text = ""
        with self.progress(f"writing {clean(path)}"):
            if str(path) == "-":
                text = "".join(pieces)
            else:
                write_text(path, pieces, replace=force)
        if text:
            self.print(text)
        else:
            self.say_written(path)

    def say_written(self, path: Path) -> None:
        """Report on `err` that a file was written."""
        from planner.show.screen import clean

        self.err.write(f"wrote {clean(path)}\n")


def check_writable(*paths: Path | None, force: bool) -> None:
    """Refuse, before a long search starts, output paths that could not be written after it.

    Raises:
        InputError: a path is not a regular file, or exists and `force` is false.
        EnvironmentProblem: the folder of a path cannot be written.
    """
    for path in filter(None, paths):
        if str(path) == "-":
            raise InputError("`-` is no file name here", hint="write the name of a file")
        try:
            is_new = not path.exists()
        except OSError as error:  # a name that no file can have
            raise EnvironmentProblem(f"cannot write {printable(str(path))}: {error.strerror}") from None
        if not (is_new or path.is_file()):
            raise InputError(f"{path} is not a file")
        if not (is_new or force):
            raise InputError(f"{path} exists", hint="add --force to replace it, or choose another name")
        if not os.access(path.parent, os.W_OK):
            raise EnvironmentProblem(f"cannot write {path}: its folder is missing or may not be written")


def run_folder(plan_path: Path) -> Path:
    """Return the default folder of a run, named after the plan file; a plan from standard input has no file name."""
    return Path("runs") / (plan_path.stem if str(plan_path) != "-" else "plan")
