"""Properties of the screen on which text is shown: its width, colour or none, Unicode or ASCII.

All text of users passes through `clean`: names are shown literally, without interpreting markup, and control characters
never reach the terminal.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from planner.specs.glossary import entry_for, section_anchor
from planner.specs.library import glossary_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import ConsoleOptions, RenderResult

_MIN_WIDTH: Final = 20
_MAX_WIDTH: Final = 120
"""Longest line in characters; longer lines are hard to read even in a wide window."""
_PIPE_WIDTH: Final = 80
LINES: Final = 30
"""Lines of an answer that is read without scrolling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Properties of an output stream; `width` is in characters, `links` is support for hyperlinks (OSC 8)."""

    width: int = _PIPE_WIDTH
    terminal: bool = False
    color: bool = False
    unicode: bool = True
    links: bool = False

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = os.environ) -> Screen:
        """Return the screen behind `stream`; a terminal has its own width, a pipe has COLUMNS or 80 columns."""
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
    # Python uses UTF-8 even in the C locale, but a user who sets LC_ALL=C wants ASCII
    plain = environ.get("LC_ALL", "") in ("C", "POSIX")
    return not plain and (stream.encoding or "").lower().replace("-", "") == "utf8"


_LINKING_TERMS: Final = ("alacritty", "foot", "xterm-ghostty", "xterm-kitty")
_LINKING_PROGRAMS: Final = ("ghostty", "iTerm.app", "vscode", "WezTerm", "zed")


def _shows_links(environ: Mapping[str, str]) -> bool:
    """Whether the terminal can show hyperlinks and runs on this machine, so that links to files here can be opened.

    The list of terminals and the switch FORCE_HYPERLINK come from the npm package supports-hyperlinks.
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
        or (vte.isascii() and vte.isdigit() and int(vte) > 5000)  # VTE 0.50.0 crashed on links
    )


_LINK: Final = re.compile("\x1b\\]8;[^;]*;([^\x1b]*)\x1b\\\\")
"""Escape codes with which rich starts and ends a link; rich adds a random id, which would make equal texts differ."""


class _Sink(io.StringIO):
    """A text buffer that reports the encoding of the real stream to rich."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override] # a plain attribute in the type stubs
        return self._encoding


def to_text(renderable: RenderableType, screen: Screen) -> str:
    """Render to text for a screen, without blanks at line ends."""
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
    """Return the text with every control, direction and surrogate character replaced by an escape sequence."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def linked(text: Text) -> Text:
    """Return a glossary term with a link to its entry, other text unchanged; screens without links omit the link."""
    entry = entry_for(text.plain) if text.plain else None
    if entry is None:
        return text
    found = text.copy()
    found.stylize(f"link {glossary_file().as_uri()}#{section_anchor(entry)}")
    return found


def stack(*parts: RenderableType | None) -> Group:
    """Stack the parts vertically, with a blank line between two parts; parts that are None are skipped."""
    shown: list[RenderableType] = []
    for part in parts:
        if part is not None:
            shown += [Text(""), part] if shown else [part]
    return Group(*shown)


class OneScreen:
    """The first of several forms of an answer that fits on one screen, or the last form, which is the shortest."""

    def __init__(self, *forms: RenderableType) -> None:
        self._forms = forms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fits = (form for form in self._forms if len(console.render_lines(form, options)) <= LINES)
        yield next(fits, self._forms[-1])


def indented(part: RenderableType) -> Padding:
    """Indent the part by two columns."""
    return Padding(part, (0, 0, 0, 2))


def section(title: str, *body: RenderableType, note: str = "") -> Group:
    """Return a heading with its body indented below; `note` follows the heading in dim text."""
    heading = linked(Text(clean(title), style="bold"))
    if note:
        heading.append(f"  {clean(note)}", style="not bold dim")
    return Group(heading, *map(indented, body))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to type; one that is too long for a line goes on in the next, as a shell reads it."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        lines = [""]
        for word in map(shlex.quote, shlex.split(self.text)):
            if lines[-1] and len(f"{lines[-1]} {word} \\") > options.max_width:
                lines.append("")
            lines[-1] += f" {word}" if lines[-1] else word
        yield Text(" \\\n".join(lines), overflow="fold")
