"""Output of `planner verify`: one rank's memory ledger compared with the bytes counted in its step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from planner.show.columns import Columns
from planner.show.screen import section, stack
from planner.show.words import line_label
from planner.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group

    from planner.verify import Verification

_NOTE: Final = (
    "Counted are the tensors that are alive in one step, which runs without a GPU and without data. Each line has its "
    "own peak, and the transients are the rest of the whole peak. Runtime, gaps of the allocator and compiled layers "
    "are not counted."
)


def verification_view(found: Verification) -> Group:
    """Show each memory line as planned and as counted, and the sums."""
    lines = [(line_label(name), *map(format_bytes, both)) for name, both in found.lines.items()]
    whole = ("whole", *map(format_bytes, (found.planned_bytes, found.counted_bytes)), f"{found.ratio:.3f}")
    table = Columns([*lines, whole], right=(1, 2, 3), header=("", "planned", "counted", "ratio"))
    title = f"Memory of rank {found.rank} (stage {found.stage}), planned and counted"
    return stack(section(title, table), Text(_verdict(found)), Text(_NOTE, style="dim"))


def _verdict(found: Verification) -> str:
    if found.agrees:
        return "The plan's figures and the counts agree, within 3 % of the whole."
    if found.differing:
        lines = ", ".join(map(line_label, found.differing))
        return f"The count differs from the plan in {lines}, by more than 3 % of the whole. Please report it."
    return f"The count differs from the plan by {abs(found.ratio - 1):.1%}: one of the two is wrong. Please report it."


def verification_to_dict(found: Verification) -> dict[str, Any]:
    """Return the output of `planner verify --json` as plain data."""
    whole = ("rank", "stage", "planned_bytes", "counted_bytes", "ratio", "agrees")
    lines = [
        {"name": name, "planned_bytes": planned, "counted_bytes": counted}
        for name, (planned, counted) in found.lines.items()
    ]
    return {name: getattr(found, name) for name in whole} | {"lines": lines}
