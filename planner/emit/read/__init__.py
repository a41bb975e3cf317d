"""Readers for files of other programs; the tables that write these files also read them.

A reader converts the text of a file into flat keys and values of one program. The program's table converts these keys
and values into fields. No part of a file is ever run.
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
"""Keys that a reader adds to the program's keys: number of hosts, ranks per host, and name or path of the model."""

THE_FILE: Final = "the file"
"""Placeholder for the file's name in `where` of a mistake; the name that the user gave replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One kind of foreign file.

    name: description for messages.
    recognises: function that decides whether a file with this name and text is of this kind.
    values: function that returns flat keys and values, with variables expanded; it raises InputError with `where` for
    text that cannot be read.
    engine: function that returns the profile that prices a file with these values.
    target: the program whose table reads these values.
    is_shell: whether the file is a shell script, for which the user can define variables.
    lacks: degrees of a layout that the program's own files have no key for.
    """

    name: str
    recognises: Callable[[str, str], bool]
    values: Callable[[str], Values]
    engine: Callable[[Values], str]
    target: Target
    is_shell: bool = False
    lacks: tuple[str, ...] = ()
