"""The opposite direction: files of other programs, read by the tables that write them.

A reader turns the text of a file into flat keys and values of one program; the program's table turns those into fields.
Nothing of a file is ever run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.emit.target import Target, Values

HOSTS: Final = "launch.hosts"
RANKS: Final = "launch.ranks"
MODEL: Final = "launch.model"
"""Keys that a reader gives beside the program's own: hosts and ranks of each that a launcher is told, and the name or
path of the model."""

THE_FILE: Final = "the file"
"""What a reader calls its file in `where` of a mistake; the name that the user gave takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One kind of foreign file.

    name: in words, for messages. recognises: whether a file with this name and text is one. values: its flat keys and
    values, with variables expanded; raises InputError with `where` of what cannot be read. engine: the profile that
    prices a file with these values. target: whose table reads them. is_shell: variables can be defined for it.
    """

    name: str
    recognises: Callable[[str, str], bool]
    values: Callable[[str], Values]
    engine: Callable[[Values], str]
    target: Target
    is_shell: bool = False
