"""Where text will be read: how wide, with colour or without, in Unicode or ASCII.

Everything that a user wrote goes through `clean`: names are shown literally, markup in them is not interpreted
and control characters never reach the terminal.
"""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Screen", "clean", "indented", "section", "stack", "to_text"]

_MIN_WIDTH: Final = 20
_MAX_WIDTH: Final = 120
"""Lines longer than this are hard to read, however wide the window is."""
_PIPE_WIDTH: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Properties of the stream that text is written to; `width` is in characters."""

    width: int = _PIPE_WIDTH
    terminal: bool = False
    color: bool = False
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = os.environ) -> Screen:
        """The screen behind `stream`: a window has its own width, a pipe has 80 columns unless COLUMNS says."""
        terminal = stream.isatty()
        asked = environ.get("COLUMNS", "")
        width = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0
        if width == 0 and terminal:
            width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
        dumb = environ.get("TERM") in ("dumb", "unknown")
        return cls(
            width=min(max(width or _PIPE_WIDTH, _MIN_WIDTH), _MAX_WIDTH),
            terminal=terminal,
            color=terminal and not dumb and not environ.get("NO_COLOR"),
            unicode=_speaks_unicode(stream, environ) and not dumb,
        )


def _speaks_unicode(stream: TextIO, environ: Mapping[str, str]) -> bool:
    # Python reads and writes UTF-8 in the C locale too; whoever sets LC_ALL=C asks for ASCII all the same
    plain = environ.get("LC_ALL", "") in ("C", "POSIX")
    return not plain and (stream.encoding or "").lower().replace("-", "") == "utf8"


class _Sink(io.StringIO):
    """A buffer that tells rich which characters the real stream can show."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override] # a plain attribute in the type stubs
        return self._encoding


def to_text(renderable: RenderableType, screen: Screen) -> str:
    """Lay a renderable out for a screen; no line ends in blanks."""
    sink = _Sink("utf-8" if screen.unicode else "ascii")
    console = Console(
        file=sink,
        width=screen.width,
        force_terminal=screen.color,
        color_system="standard" if screen.color else None,
        no_color=not screen.color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={},
    )
    console.print(renderable, soft_wrap=False)
    return "".join(f"{line.rstrip()}\n" for line in sink.getvalue().splitlines())


def clean(text: object) -> str:
    """The text with every control, direction and surrogate character written out as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def stack(*parts: RenderableType | None) -> Group:
    """The parts below each other with a blank line between; None is left out."""
    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            shown += [Text(""), part] if shown else [part]
    return Group(*shown)


def indented(part: RenderableType) -> Padding:
    """The part two columns further in."""
    return Padding(part, (0, 0, 0, 2))


def section(title: str, *body: RenderableType, note: str = "") -> Group:
    """A heading with its body indented below; `note` stands beside the heading in a quiet voice."""
    heading = Text(clean(title), style="bold")
    if note:
        heading.append(f"  {clean(note)}", style="not bold dim")
    return Group(heading, *map(indented, body))
