"""The integer program's best choice over all candidates, with the bound that proves it.

1. A greedy heuristic finds a choice, whose step time is an upper bound. Columns and candidates whose lower bound
   exceeds this upper bound are left out (`pruning.lower_bounds`).
2. One integer program decides among the remaining candidates (`integer_program`). Its answer must be at least as good
   as the greedy choice.

`decision` compares the answer with the dynamic program's, which has run before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from planner.search.optimum.candidate import Disagreement
from planner.search.optimum.integer_program import SolverName, solve_program
from planner.search.optimum.pruning import incumbent, lower_bounds
from planner.search.space.arrays import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.search.optimum.candidate import Candidate, Choice

_MARGIN = 0.001
"""The integer program includes all columns whose bound exceeds the incumbent by at most this share.

With this margin the answer does not depend on rounding in the bounds, and solving takes hardly longer. A margin of 0.02
makes the search for Llama-3-405B on 100,000 devices take 13.6 s instead of 7.2 s.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The answer of the integer program, with the bound and the status that prove it."""

    choice: Choice | None  # None: nothing fits, or nothing was found in time
    status: Literal["optimal", "time limit", "infeasible", "interrupted", "out of time"]
    objective_seconds: float  # step time of the choice; infinite without one
    gap: float  # the choice is above the optimum by at most this share of its own step time
    num_columns: int  # columns in the integer program
    solver: str  # the method behind the answer: cbc, highs or "dynamic program"
    warnings: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all configurations were searched, even if the integer program did not finish."""
        return self.status not in ("interrupted", "out of time")


INTERRUPTED = Solution(
    choice=None,
    status="interrupted",
    objective_seconds=np.inf,
    gap=np.inf,
    num_columns=0,
    solver="dynamic program",
    warnings=("interrupted: the best layout until then",),
)
"""The solution of a search that was interrupted."""

OUT_OF_TIME = replace(
    INTERRUPTED, status="out of time", warnings=("the time limit ended the search: the best layout until then",)
)
"""The solution of a search that reached its time limit before it was complete."""


def solve(
    candidates: Sequence[Candidate],
    *,
    solver: SolverName = "cbc",
    time_limit: float | None = None,
) -> Solution:
    """The best choice over all candidates.

    time_limit: seconds of wall time for the integer program. When the limit is reached, the status is "time limit", and
    the answer is the better of the integer program's choice and the greedy choice, with its `gap` to the best bound.
    Any of several tied choices may be returned.

    Raises:
        SolverTrouble: the solver failed.
        EnvironmentProblem: the solver asked for is not installed.
        Disagreement: the integer program's answer is worse than a greedy choice, which is a bug.
    """
    lower = lower_bounds(candidates).candidate
    known = incumbent(candidates, lower)
    upper = None if known is None else known.objective_seconds * (1 + _MARGIN)
    answer = solve_program(candidates, upper_bound=upper, solver=solver, time_limit=time_limit)
    told = np.inf if answer.choice is None else answer.choice.objective_seconds
    if answer.status != "time limit" and known and not told <= known.objective_seconds * (1 + AGREEMENT):
        raise Disagreement(
            f"a greedy assignment takes {known.objective_seconds!r} s, and the integer program: {answer}"
        )
    found = [choice for choice in (answer.choice, known) if choice is not None]
    choice = min(found, key=lambda choice: choice.objective_seconds, default=None)  # the solver's if they tie
    late = (f"{solver} reached its time limit; the answer is the dynamic program's",)
    return Solution(
        choice=choice,
        status=answer.status,
        objective_seconds=np.inf if choice is None else choice.objective_seconds,
        gap=_gap(choice, answer.bound_seconds),
        num_columns=answer.num_columns,
        solver=solver,
        warnings=late if answer.status == "time limit" else (),
    )


def _gap(choice: Choice | None, bound: float) -> float:
    if choice is None:
        return 0.0 if bound == np.inf else np.inf
    return max(0.0, (choice.objective_seconds - bound) / choice.objective_seconds) if choice.objective_seconds else 0.0
