"""Progress of a long search for a waiting user, and a search's counts and times for a file."""

from __future__ import annotations

import json
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from rich.console import Console
from rich.text import Text

from planner.errors import EnvironmentProblem
from planner.search.reporter import Reporter
from planner.show.screen import Screen, clean
from planner.units import format_seconds

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE_SECONDS: Final = 0.5
"""A search that ends within this time shows no progress."""

_REFRESH_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 5.0
"""Time between two lines of progress if the stream cannot erase a line; it doubles while the text stays the same."""


class Progress(Reporter):
    """Stores the search's reports and shows progress at intervals; as a context manager it times the search."""

    def __init__(self, stream: TextIO, first: str = "listing layouts") -> None:
        self.stats: dict[str, Any] = {}
        self._about = ""
        self._start = time.perf_counter()
        self._stream = stream
        self._text = first
        self._console: Console | None = None  # set while a status line is shown on it
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=self._show_status if _can_wipe(stream) else self._write_lines, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._mark("total_seconds")

    def _show_status(self) -> None:
        """Show one status line on a terminal, update it, and erase it at the end."""
        if self._done.wait(_PATIENCE_SECONDS):
            return
        from rich.status import Status

        screen = Screen.of(self._stream)
        console = Console(file=self._stream, width=screen.width)
        with Status(Text(self._text), console=console, spinner="dots" if screen.unicode else "line") as status:
            self._console = console
            while not self._done.wait(_REFRESH_SECONDS):
                status.update(Text(self._text))
            self._console = None

    def _write_lines(self) -> None:
        """Write lines of progress to a file or a pipe; if nobody reads the pipe, stop without an error."""
        wait, last = _LINE_SECONDS, ""
        while not self._done.wait(wait):
            wait, last = (2 * wait if self._text == last else _LINE_SECONDS), self._text
            try:
                self._stream.write(f"{last}\n")
                self._stream.flush()
            except (OSError, ValueError):
                return

    def _mark(self, name: str) -> None:
        self.stats[name] = time.perf_counter() - self._start

    def noted(self, note: str) -> None:
        """Print a note at once, above the status line."""
        if self._console is None:
            self._stream.write(f"note: {note}\n")
        else:
            self._console.print(Text(f"note: {note}"), soft_wrap=True)

    def about(self, question: str) -> None:
        """Set the question that the next searches answer; progress texts begin with it."""
        self._about = question
        self._show("")

    def _show(self, text: str) -> None:
        self._text = ": ".join(filter(None, (clean(self._about), text)))

    def candidates(self, num_legal: int, num_refused: int) -> None:
        """Store the numbers of legal and refused configurations."""
        self._mark("listed_after_seconds")
        self.stats |= {"num_legal": num_legal, "num_refused": num_refused}
        self._show(f"{num_legal:,} configurations")

    def pruned(self, reason: str, num_pruned: int) -> None:
        """Store the number of configurations that a bound ruled out."""
        self.stats.setdefault("num_pruned", {})[reason] = num_pruned

    def priced(self, num_priced: int, incumbent_seconds: float) -> None:
        """Show the number of configurations priced so far."""
        self.stats["num_priced"] = num_priced
        best = f"best step {format_seconds(incumbent_seconds)}" if math.isfinite(incumbent_seconds) else "none fits yet"
        self._show(f"{num_priced:,} of {self.stats.get('num_legal', 0):,} configurations priced, {best}")

    def solving(self, solver: str, num_candidates: int) -> None:
        """Show the name of the running solver."""
        self._mark("priced_after_seconds")
        self._show(f"{solver.upper()} proves the best of {num_candidates:,}")

    def solved(self, status: str, objective_seconds: float, gap: float) -> None:
        """Store the status, objective and gap of the finished solve."""
        self._mark("solved_after_seconds")
        self.stats |= {"status": status, "objective_seconds": objective_seconds, "gap": gap}


def _can_wipe(stream: TextIO) -> bool:
    return stream.isatty() and Screen.of(stream).color


def write_stats(progress: Progress, path: Path) -> None:
    """Write counts and times of a search to a file; the times differ from run to run, so they are not in the plan.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(progress.stats, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from None
