"""Tables whose entries are imported when they are asked for: commands, programs to emit for, questions and sections.

A command needs few of them, and to import all takes longer than to answer. An entry is written as `module:variable`,
which `tests/test_architecture.py` reads as an import, so that the rules of imports hold for it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def at(place: str) -> Any:
    """The variable at `module:variable` of this package; the module is imported now."""
    module, _, variable = place.partition(":")
    return getattr(import_module(f"planner.{module}"), variable)


class Later(Mapping[str, T]):
    """A table of names, each of whose entries is loaded when it is asked for; a fault in one stops no other."""

    def __init__(self, places: Mapping[str, Any], load: Callable[[str], T]) -> None:
        self._places, self._load = places, load

    def __getitem__(self, name: str) -> T:
        if name not in self._places:
            raise KeyError(name)
        return self._load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
