"""The input of a starter: a plan, the program that runs the plan, and the command to start on each host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from planner.emit.target import How, Place, Target, Values
    from planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A plan as the settings of a program that is ready to start.

    values: keys and values, including placeholders.
    """

    plan: Plan
    target: Target
    values: Values
    how: How

    @property
    def is_ours(self) -> bool:
        """Whether the program is our own trainer: it finds the other hosts by itself and accepts no further options."""
        return self.target.launcher is not None

    def command(self, place: Place | None) -> str:
        """Shell text that starts the program on one host."""
        return self.target.command(self.values, self.plan, self.how, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """A way to start a program on the hosts.

    script: the file that a user starts.
    write: function that returns all its files, name -> text.
    yours: placeholder -> meaning, for the placeholders that the starter adds.
    """

    script: str
    write: Callable[[Start], dict[str, str]]
    yours: Mapping[str, str] = field(default_factory=dict)
