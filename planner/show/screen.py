"""Where text will be read: how wide, with colour or without, in Unicode or ASCII.

Everything that a user wrote goes through `clean`: names are shown literally, markup in them is not interpreted
and control characters never reach the terminal.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.specs.glossary import entry_for, section_anchor
from planner.specs.library import glossary_file

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIN_WIDTH: Final = 20
_MAX_WIDTH: Final = 120
"""Lines longer than this are hard to read, however wide the window is."""
_PIPE_WIDTH: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Properties of the stream that text is written to; `width` is in characters, `links` are hyperlinks (OSC 8)."""

    width: int = _PIPE_WIDTH
    terminal: bool = False
    color: bool = False
    unicode: bool = True
    links: bool = False

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = os.environ) -> Screen:
        """The screen behind `stream`: a window has its own width, a pipe has 80 columns unless COLUMNS says."""
        terminal = stream.isatty()
        asked = environ.get("COLUMNS", "")
        width = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0
        if width == 0 and terminal:
            width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
        dumb = environ.get("TERM") in ("dumb", "unknown")
        color = terminal and not dumb and not environ.get("NO_COLOR")
        return cls(
            width=min(max(width or _PIPE_WIDTH, _MIN_WIDTH), _MAX_WIDTH),
            terminal=terminal,
            color=color,
            links=color and _shows_links(environ),
            unicode=_speaks_unicode(stream, environ) and not dumb,
        )


def _speaks_unicode(stream: TextIO, environ: Mapping[str, str]) -> bool:
    # Python reads and writes UTF-8 in the C locale too; whoever sets LC_ALL=C asks for ASCII all the same
    plain = environ.get("LC_ALL", "") in ("C", "POSIX")
    return not plain and (stream.encoding or "").lower().replace("-", "") == "utf8"


_LINKING_TERMS: Final = ("alacritty", "foot", "xterm-ghostty", "xterm-kitty")
_LINKING_PROGRAMS: Final = ("ghostty", "iTerm.app", "vscode", "WezTerm", "zed")


def _shows_links(environ: Mapping[str, str]) -> bool:
    """Whether the terminal is one that is known to show links, and they lead to files of this machine.

    The others are as the npm package supports-hyperlinks tells them; FORCE_HYPERLINK is its switch.
    """
    if forced := environ.get("FORCE_HYPERLINK"):
        return forced != "0"
    term = environ.get("TERM", "")
    if environ.get("SSH_CONNECTION") or term.startswith(("screen", "tmux")):
        return False
    vte = environ.get("VTE_VERSION", "")
    return (
        term in _LINKING_TERMS
        or environ.get("TERM_PROGRAM") in _LINKING_PROGRAMS
        or bool(environ.get("WT_SESSION") or environ.get("KONSOLE_VERSION"))
        or (vte.isascii() and vte.isdigit() and int(vte) > 5000)  # 0.50.0 crashed on them
    )


_LINK: Final = re.compile("\x1b\\]8;[^;]*;([^\x1b]*)\x1b\\\\")
"""How rich starts and ends a link, with a number of its own drawing that would make equal text unequal."""


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
    text = _LINK.sub(lambda found: f"\x1b]8;;{found[1]}\x1b\\" if screen.links else "", sink.getvalue())
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def clean(text: object) -> str:
    """The text with every control, direction and surrogate character written out as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def linked(text: Text) -> Text:
    """The text with a link to its section of the glossary, if it is a term; a screen without links leaves it out."""
    entry = entry_for(text.plain) if text.plain else None
    if entry is None:
        return text
    found = text.copy()
    found.stylize(f"link {glossary_file().as_uri()}#{section_anchor(entry)}")
    return found


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
    heading = linked(Text(clean(title), style="bold"))
    if note:
        heading.append(f"  {clean(note)}", style="not bold dim")
    return Group(heading, *map(indented, body))
