"""Text of error messages: every mistake with its place, the user's own line and a hint."""

from __future__ import annotations

import re
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from planner.show.screen import Screen, clean

if TYPE_CHECKING:
    from planner.errors import Mistake, PlannerError

_MOST: Final = 20
_PLACE: Final = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?")


def mistakes_text(error: PlannerError, screen: Screen) -> str:
    """Return every mistake as text for a screen; the first twenty are shown in full."""
    parts = [_mistake_text(mistake, screen) for mistake in error.mistakes[:_MOST]]
    left = len(error.mistakes) - _MOST
    return "\n".join(parts) + (f"\n... and {left} more\n" if left > 0 else "")


def _mistake_text(mistake: Mistake, screen: Screen) -> str:
    place = _PLACE.fullmatch(mistake.where)
    lines = [f"{_style('error:', '1;31', screen)} {_lines(mistake.message, screen)}"]
    if mistake.where:
        lines.append(f"  {_style('-->', '2', screen)} {clean(mistake.where)}")
    if mistake.source_line.strip():
        lines += _quote(mistake.source_line, place, screen)
    if mistake.hint:
        lines.append(f"{_style('help:', '1;36', screen)} {_lines(mistake.hint, screen)}")
    return "\n".join(lines) + "\n"


def _quote(source_line: str, place: re.Match[str] | None, screen: Screen) -> list[str]:
    """Return the user's line after its line number, cut around the column of the mistake, and a caret below it."""
    number = place["line"] if place else ""
    column = int(place["column"] or 0) if place else 0
    room = max(screen.width - len(number) - 6, 10)
    start = max(0, column - room // 2) if column > room else 0
    text = source_line.rstrip("\r\n")
    before, rest = (
        clean_tabs(text[start : max(column - 1, start)]),
        clean_tabs(text[max(column - 1, start) : start + room]),
    )
    quoted = [f" {number} {_style('|', '2', screen)} {before}{rest}"]
    if column:
        quoted.append(
            f" {' ' * len(number)} {_style('|', '2', screen)} {' ' * len(before)}{_style('^', '1;31', screen)}"
        )
    return quoted


def clean_tabs(text: str) -> str:
    """Replace each tab by one blank, so that a caret below the text is in the right column."""
    return clean(text.replace("\t", " "))


def _lines(text: str, screen: Screen) -> str:
    """Format text after `error:` or `help:`; lines are wrapped on a terminal, and kept whole for search in a pipe.

    A line that is a command is not wrapped, so that it can be pasted.
    """
    lines = [clean(line) for line in text.split("\n")]
    if screen.terminal:
        width = screen.width - len("error: ")
        lines = list(chain(*(_broken(line, width) for line in lines)))
    return "\n  ".join(lines)


def _broken(line: str, width: int) -> list[str]:
    return [line] if line.startswith("planner ") else wrap(line, width, break_on_hyphens=False)


def _style(text: str, code: str, screen: Screen) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if screen.color else text
