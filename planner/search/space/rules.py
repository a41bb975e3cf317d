"""Rules that a layout must meet before it is priced; a refusal names the broken rule.

One set of rules checks a user's layout as well as arrays of candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.search.space.degree_rules import DEGREE_RULES
from planner.search.space.list_rules import LIST_RULES
from planner.search.space.training_rules import TRAINING_RULES

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.specs.job import Job

RULES: Final = (*TRAINING_RULES, *DEGREE_RULES)
"""Rules that read degrees; rules that can rule out every layout are first, so that a refusal names them."""


def broken_rules(
    job: Job, layout: Layout, *, except_for: tuple[str, ...] = (), searched: bool = False
) -> tuple[str, ...]:
    """Reasons why a layout cannot run, one for each broken rule; empty when it can run.

    except_for: names of rules that are not checked.
    searched: include reasons why the search leaves the layout out.
    """
    rules = (rule for rule in (*RULES, *LIST_RULES) if searched or not rule.left_out)
    return tuple(filter(None, (rule.fault(job, layout) for rule in rules if rule.name not in except_for)))
