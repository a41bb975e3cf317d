"""All mistakes in documents and options, reported at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from planner.errors import InputError, Mistake
from planner.specs.text import printable
from planner.specs.yaml import MAX_MISTAKES

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Mistakes:
    """The mistakes found so far in all documents and options."""

    def __init__(self) -> None:
        self.found: list[Mistake] = []

    def add(self, message: str, where: str = "", hint: str = "") -> None:
        """Add one mistake; its text is made safe to show."""
        self.found.append(Mistake(message=printable(message, 300), where=where, hint=printable(hint, 400)))

    def attempt(self, read: Callable[..., T], *arguments: Any) -> T | None:
        """The result of `read`; if it finds mistakes, they are collected and the result is None."""
        try:
            return read(*arguments)
        except InputError as error:
            known = {mistake.where for mistake in self.found if mistake.where}
            # one mistake for each place: a device that was not found would also be reported as no mapping
            self.found += [each for each in error.mistakes if each.where not in known]
            return None

    def raise_if_any(self) -> None:
        """Report all mistakes.

        Raises:
            InputError: there is at least one mistake.
        """
        if self.found:
            raise InputError(*self.found[:MAX_MISTAKES])
