"""What a starter gets: a plan, the program that carries it out, and the command that it starts on each host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from planner.emit.target import How, Place, Target, Values
    from planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A plan in the words of a program, ready to be started. values: what its table wrote, placeholders included."""

    plan: Plan
    target: Target
    values: Values
    how: How

    @property
    def is_ours(self) -> bool:
        """Whether the program meets the other hosts by itself and takes no further options behind its own."""
        return self.target.launcher is not None

    def command(self, place: Place | None) -> str:
        """Shell text that starts the program on one host."""
        return self.target.command(self.values, self.plan, self.how, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Who starts a program on the hosts. script: the file that a user starts; write: all its files, name -> text.

    yours: placeholders of its own, and what they stand for.
    """

    name: str
    script: str
    write: Callable[[Start], dict[str, str]]
    yours: Mapping[str, str] = field(default_factory=dict)
