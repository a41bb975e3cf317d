"""Readers for files of other programs; the tables that write these files also read them.

A reader converts the text of a file into flat keys and values of one program. The program's table converts these keys
and values into fields. No part of a file is ever run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from planner.emit.target import Target, Values

HOSTS: Final = "launch.hosts"
RANKS: Final = "launch.ranks"
MODEL: Final = "launch.model"
METHOD: Final = "launch.method"
PROGRAM: Final = "launch.program"
"""Keys that a reader adds to the program's keys: number of hosts, ranks per host, name or path of the model, a method
that the file does not name itself (a reader that prices its method adds an empty one), and the script in Python."""

OF_RECIPE: Final = "the recipe's value is not known"
"""Rule for a key that a file leaves to a recipe, which is the program's own code and is never run."""

THE_FILE: Final = "the file"
"""Placeholder for the file's name in `where` of a mistake; the name that the user gave replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One kind of foreign file.

    name: description for messages.
    signs: patterns that all files of this kind have; `^` begins a line.
    values: function that returns flat keys and values, with variables expanded; it raises InputError with `where` for
    text that cannot be read.
    engine: function that returns the profile that prices a file with these values.
    target: the program whose table reads these values.
    files: keys whose value names another file of the run -> function that returns the values of that file's text.
    assumed: function that returns keys of the layout (or `engine`) that the values leave open -> the rule that fills
    them; the rule `OF_RECIPE` means that only the program itself knows the value.
    is_shell: whether the file is a shell script, for which the user can define variables.
    answer: the default number of tokens of a generated answer; 0 if the program has none.
    complete: function that adds the values that the program takes by default, when all files of the run are read.
    lacks: degrees of a layout that the program's own files have no key for; no plan from them has these degrees.
    renamed: key of the file -> key of the program's table, for mistakes.
    options: groups in facts.yaml of the options that the program's parser accepts; without groups it accepts any.
    writes: the program whose own files `planner emit` writes for plans from such files; empty for the usual one.
    """

    name: str
    signs: tuple[str, ...]
    values: Callable[[str], Values]
    engine: Callable[[Values], str]
    target: Target
    files: Mapping[str, Callable[[str], Values]] = field(default_factory=dict)
    assumed: Callable[[Values], Mapping[str, str]] = lambda values: {}  # noqa: ARG005
    is_shell: bool = False
    answer: int = 0
    complete: Callable[[Values], Values] = lambda values: values
    lacks: tuple[str, ...] = ()
    writes: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()

    def recognises(self, text: str) -> bool:
        """Whether a file with this text is of this kind."""
        return has_all(self.signs, _COMMENT.sub("", text))


_COMMENT: Final = re.compile(r"^[^\S\n]*#.*$", re.MULTILINE)
"""Matches a line that is a comment in all kinds of files but JSON: what it quotes is no sign of the file's kind."""


def has_all(patterns: Iterable[str], text: str) -> bool:
    """Whether all patterns are found in a text of several lines."""
    return all(re.search(each, text, re.MULTILINE) for each in patterns)
