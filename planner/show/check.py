"""Output of `planner check`: a line for each comparison of a run with its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from planner.show.screen import clean, section

if TYPE_CHECKING:
    from rich.console import Group

    from planner.evidence.check import Check


def check_view(found: Check) -> Group:
    """Show whether the run passes, and each finding behind the word that the check fails on."""
    words = {True: "ok", False: "worse", None: "note"}
    lines = [
        Text(clean(f"{'FAILED' if each.failed else words[each.holds]:6}  {each.reason}: {each.text}"))
        for each in found.findings
    ]
    return section("The run passes" if found.passed else "The run fails", *lines)
