"""Properties of the tables of emit's programs, for tests."""

from __future__ import annotations

from planner.emit.target import FIELDS, Target


def unsaid(target: Target) -> tuple[str, ...]:
    """Fields that a table neither expresses nor refuses; there must be none."""
    says = [each.says for each in target.settings] + [each.says for each in target.refuse]
    said = {path for each in says for path in each}
    return tuple(each for each in FIELDS if not {each, each.partition(".")[0]} & said)
