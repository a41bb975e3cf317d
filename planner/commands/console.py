"""Where a command reads and writes: the streams of this process, or others in a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from planner.errors import EnvironmentProblem, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from planner.plan import Plan
    from planner.show.progress import Progress


class Console:
    """Results go to `out`, everything else to `err`; a plan called `-` comes from `source`."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, source: TextIO | None = None) -> None:
        self.out, self.err, self.source = out or sys.stdout, err or sys.stderr, source or sys.stdin

    def print(self, text: str) -> None:
        """Write a result; what the terminal's encoding cannot say is escaped rather than fatal."""
        encoding = self.out.encoding or "utf-8"
        self.out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self.out.flush()

    def render(self, renderable: RenderableType) -> None:
        """Lay a result out for the screen behind `out`; text is a document and is written as it is."""
        from planner.show.screen import Screen, to_text

        self.print(renderable if isinstance(renderable, str) else to_text(renderable, Screen.of(self.out)))

    def progress(self, first: str = "listing layouts") -> Progress:
        """Shows on `err` what a search does, as a context."""
        from planner.show.progress import Progress

        return Progress(self.err, first)

    def read_plan(self, name: str) -> Plan:
        """The plan in a file, or for `-` the one that comes from `source`."""
        from planner.reading import read_plan

        return read_plan(Path(name), source=self.source, tell=self.note)

    def note(self, text: str) -> None:
        """Say on `err` what a reader should know of the input."""
        self.err.write(f"note: {text}\n")

    def write(self, path: Path, pieces: Iterable[str], *, force: bool) -> None:
        """Write a file and say so, or for `-` a result."""
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
        """Name a file that is there now."""
        from planner.show.screen import clean

        self.err.write(f"wrote {clean(path)}\n")


def check_writable(*paths: Path | None, force: bool) -> None:
    """Refuse before a long search what could not be written after it.

    Raises:
        InputError: a path is no file, or exists and `force` is false.
        EnvironmentProblem: its folder cannot be written.
    """
    for path in filter(None, paths):
        if str(path) == "-":
            raise InputError("`-` is no file name here", hint="write the name of a file")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file")
        if path.exists() and not force:
            raise InputError(f"{path} exists", hint="add --force to replace it, or choose another name")
        if not os.access(path.parent, os.W_OK):
            raise EnvironmentProblem(f"cannot write {path}: its folder is missing or may not be written")


def run_folder(plan_path: Path) -> Path:
    """Where a run lives by default; a plan from standard input has no name to take."""
    return Path("runs") / (plan_path.stem if str(plan_path) != "-" else "plan")
