"""Users' text in messages: printable and short, with a suggestion if a name is nearly right."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def printable(text: str, limit: int = 160) -> str:
    """`text` without control, escape and bidirectional characters, cut to `limit` characters."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    shown = (c if c.isprintable() else " " if c == "\t" else ascii(c)[1:-1] for c in cut)
    return cut if cut.isprintable() else "".join(shown)


def quoted(value: Any) -> str:
    """A value in backticks, as the user wrote it, for a message."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = {"True": "true", "False": "false", "None": "null"}.get(repr(value), str(value))
    return f"`{printable(text, 60)}`"


def closest(word: str, known: Iterable[str]) -> list[str]:
    """The one or two known words of which `word` may be a misspelling."""
    return difflib.get_close_matches(word[:100].lower(), list(known), n=2, cutoff=0.6)


def any_of(values: Iterable[object]) -> str:
    """Values as a list in words: `1`, `1 or 2`, `1, 2 or 4`; `nothing` if there are none."""
    *rest, last = list(map(str, values)) or ["nothing"]
    return f"{', '.join(rest)} or {last}" if rest else last


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """A hint that names the closest known words, or else `otherwise`."""
    close = closest(word, known)
    return f"did you mean {' or '.join(f'`{each}`' for each in close)}?" if close else otherwise
