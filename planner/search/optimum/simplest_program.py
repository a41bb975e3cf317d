"""The simplest choice within a window, by two integer programs: the first minimises the keys, the second the step time.

Both programs have the sets, variables and rows (1) to (8) of the first solve (`integer_program`); D_c of (8) is the
longest step time of the window. Each column has a class of risk g and a number a of recomputed tenths of layers.

Variables: R in {0, 1, ..} the class of risk of the choice; T in {0, 1, ..} the recomputed tenths of the model; E in {0,
1} whether stages are uneven; e_cq in {0, 1} candidate c is chosen, and q layers on each of its inner stages.

    (9)   R >= sum_ck g_crk y_crk             for all r                       -> _count_risk()
    (10)  T >= sum_crk a_crk y_crk / L_c                                      -> _count_repeated()
    (11)  e_cq <= sum_{k: l_crk = q, equal chunks} y_crk   for all c, q, inner stages r
    (12)  E + sum_cq e_cq + sum_{c without inner stages} w_c >= 1             -> _count_uneven()

Keys are the digits of one whole number, with the first key in front. The base of each digit exceeds every possible
value of its key, so the least number has the lexicographically least keys.

    first     minimise the number of R, T, E and the keys of the chosen candidate
    second    minimise the step time, with R, T and E at most the values that the first program found, among the
              candidates whose own keys equal the first program's; the first program's choice is one of them, so columns
              whose lower bound exceeds its step time are left out
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import ge, le
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import pulp

from planner.search.optimum.candidate import Choice, dominated
from planner.search.optimum.integer_program import JointProgram, SolverName, Terms, columns_within, weighted_sum
from planner.search.optimum.pruning import greedy_choice, lower_bounds
from planner.search.optimum.simplicity import Simplicity, tenths_of
from planner.search.optimum.solver_process import run_solver
from planner.search.space.arrays import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.numbers import IntArray, Mask
    from planner.search.optimum.pruning import LowerBounds
    from planner.search.optimum.simplicity import Rated

Status = Literal["optimal", "time limit", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimplestAnswer:
    """The answer of the two programs; `choice` is None if none exists, or none was found in time."""

    status: Status
    choice: Choice | None = None
    simplicity: Simplicity | None = None
    num_candidates: int = 0
    num_columns: int = 0
    solver: str = ""


class _KeyProgram(JointProgram):
    """The programs of the module's docstring, as a PuLP problem; its objective is the step time at first."""

    def __init__(self, rated: Sequence[Rated], bounds: LowerBounds) -> None:
        super().__init__([each.candidate for each in rated], bounds)
        self._rated = rated
        self._risk = self._whole("risk", max(int(each.risk.max(initial=0)) for each in rated))
        self._tenths = self._whole("tenths", max(_most_tenths(each) for each in rated))
        self._uneven = self._whole("uneven", 1)
        self._count_risk()
        self._count_repeated()
        self._count_uneven()

    def minimise_keys(self) -> None:
        """Make the keys the objective, instead of the step time."""
        digits: dict[str, tuple[int, Terms]] = {
            "idle": self._of_candidates([each.idle for each in self._rated]),
            "recomputed": (_base(self._tenths), [(self._tenths, 1.0)]),
            "interleave": self._of_candidates([each.interleave for each in self._rated]),
            "uneven": (2, [(self._uneven, 1.0)]),
            "axes": self._of_candidates([each.axes for each in self._rated]),
            "risk": (_base(self._risk), [(self._risk, 1.0)]),
        }
        coefficients: dict[pulp.LpVariable, float] = {}
        weight = 1
        for base, digit in (digits[key] for key in reversed(Simplicity._fields)):
            for variable, value in digit:
                coefficients[variable] = coefficients.get(variable, 0.0) + weight * value
            weight *= base
        self.problem.setObjective(weighted_sum([*coefficients.items()]))

    def allow(self, simplicity: Simplicity) -> None:
        """Require that the keys decided by columns do not exceed the values in `simplicity`."""
        for variable, most in (
            (self._risk, simplicity.risk),
            (self._tenths, simplicity.recomputed),
            (self._uneven, simplicity.uneven),
        ):
            self._add([(variable, 1.0)], le, f"most_{variable.name}", most)

    def _whole(self, name: str, most: int) -> pulp.LpVariable:
        return self.problem.add_variable(name, 0, most, pulp.LpInteger)

    def _of_candidates(self, values: list[int]) -> tuple[int, Terms]:
        """The digit of a key of the candidate itself: the position of its value among the distinct values."""
        places = sorted(set(values))
        return len(places), [(w, float(places.index(value))) for w, value in zip(self._w, values, strict=True)]

    def _count_risk(self) -> None:
        for stage in range(max(each.candidate.num_stages for each in self._rated)):
            terms = [
                (self._y[c][k], -float(each.risk[k]))
                for c, each in enumerate(self._rated)
                for k in np.flatnonzero((each.candidate.stage == stage) & (each.risk > 0)).tolist()
            ]
            if terms:
                self._add([(self._risk, 1.0), *terms], ge, f"risk_{stage}")

    def _count_repeated(self) -> None:
        terms = [
            (self._y[c][k], -float(each.repeated[k]) / each.candidate.num_layers)
            for c, each in enumerate(self._rated)
            for k in np.flatnonzero(each.repeated).tolist()
        ]
        if terms:
            self._add([(self._tenths, 1.0), *terms], ge, "repeated")

    def _count_uneven(self) -> None:
        even: Terms = [(self._uneven, 1.0)]
        for c, each in enumerate(self._rated):
            if each.candidate.num_stages < 3:
                even.append((self._w[c], 1.0))
                continue
            for count in np.unique(each.candidate.layers[each.inner & each.alike]).tolist():
                chosen = self._binary(f"e_{c}_{count}")
                even.append((chosen, 1.0))
                for stage in range(1, each.candidate.num_stages - 1):
                    own = (each.candidate.stage == stage) & (each.candidate.layers == count) & each.alike
                    terms = [(self._y[c][k], 1.0) for k in np.flatnonzero(own).tolist()]
                    self._add([*terms, (chosen, -1.0)], ge, f"even_{c}_{count}_{stage}")
        self._add(even, ge, "even", 1)


def _base(variable: pulp.LpVariable) -> int:
    return int(variable.upBound) + 1


def _most_tenths(rated: Rated) -> int:
    """Upper bound of the recomputed tenths of the model in any choice of the candidate."""
    candidate = rated.candidate
    most = np.zeros(candidate.num_stages, dtype=np.int64)
    np.maximum.at(most, candidate.stage, rated.repeated)
    return tenths_of(int(most.sum()), candidate.num_layers)


_Entry: TypeAlias = "tuple[Simplicity, float, Rated]"
"""The lower bounds of a candidate's keys and step seconds, and the candidate."""


class Contenders:
    """Candidates that may have the simplest choice, reduced to the columns that this choice may use.

    Four things are left out:

    - columns that no choice within the window can use, by the lower bounds of step times,
    - columns that recompute more than a tried choice with as few idle devices,
    - columns that another column of the same stage, state and layers dominates in every price and key, and
    - candidates whose lower bound of the keys is worse than the keys of a tried choice.
    """

    def __init__(self) -> None:
        self.known: tuple[Simplicity, float] | None = None  # keys and seconds of the best choice tried
        self._rated: list[_Entry] = []

    def may_have(self, least: Simplicity, seconds: float) -> bool:
        """Whether a choice with these lower bounds of keys and seconds may be better than the best choice tried."""
        if self.known is None:
            return True
        return least < self.known[0] or (least == self.known[0] and seconds <= self.known[1] * (1 + AGREEMENT))

    def add(self, rated: Sequence[Rated]) -> None:
        """Add candidates, reduced to the columns that a choice within the window may use (`columns_within`)."""
        seconds = lower_bounds([each.candidate for each in rated]).candidate.tolist()
        kept = [each.keep(~dominated(each.candidate, each.risk, each.repeated)) for each in rated]
        added = list(zip(map(_least_keys, kept), seconds, kept, strict=True))
        for least, _, each in sorted(added, key=lambda entry: entry[:2]):
            if self.known is not None and least >= self.known[0]:
                break
            self._try(each)
        self._rated += [entry for entry in added if self.may_have(*entry[:2])]

    def _try(self, rated: Rated) -> None:
        """Try greedy choices on larger and larger sets of columns, simplest columns first, until a choice exists."""
        for columns in _simple_columns(rated):
            choice = greedy_choice(rated.candidate.keep(columns))
            if choice is not None:
                keys = rated.simplicity(columns[list(choice.columns)].tolist())
                found = keys, choice.objective_seconds
                self.known = found if self.known is None else min(self.known, found)
                return

    def _as_simple(self, rated: Rated) -> Rated:
        """The candidate without columns that recompute more than the best choice tried, if no earlier key is better."""
        if self.known is None or rated.idle != self.known[0].idle:
            return rated
        return rated.keep(rated.repeated <= self.known[0].recomputed * rated.candidate.num_layers)

    def left(self) -> list[Rated]:
        """The candidates that may still have the simplest choice, after all candidates have been added."""
        rated = [self._as_simple(each) for least, seconds, each in self._rated if self.may_have(least, seconds)]
        within = columns_within([each.candidate for each in rated], np.inf)
        return [rated[index].keep(columns) for index, columns in within.items()]


def solve_simplest(
    rated: Sequence[Rated], *, solver: SolverName = "cbc", time_limit: float | None = None
) -> SimplestAnswer:
    """The simplest choice over all candidates (`Contenders.left`) whose step is within its `longest_seconds`.

    time_limit: seconds of wall time for each of the two programs.

    Raises:
        SolverTrouble: the solver is missing, was killed, or gave an answer that cannot be read.
        EnvironmentProblem: the requested solver could be installed, but is not.
    """
    if not rated:
        return SimplestAnswer(status="infeasible")
    choice, status = _run(rated, None, solver, time_limit)
    if choice is not None and status == "optimal":
        simplicity = rated[choice.candidate].simplicity(choice.columns)
        alike = [c for c, each in enumerate(rated) if _own_keys(each) == _own_keys(simplicity)]
        columns_of = columns_within([rated[c].candidate for c in alike], choice.objective_seconds)
        within = [rated[alike[index]].keep(columns) for index, columns in columns_of.items()]
        choice, status = _run(within, simplicity, solver, time_limit)
        choice = choice and _before_reduction(choice, alike, columns_of)
    return SimplestAnswer(
        status=status,
        choice=choice,
        simplicity=None if choice is None else rated[choice.candidate].simplicity(choice.columns),
        solver=solver,
        num_candidates=len(rated),
        num_columns=sum(each.candidate.num_columns for each in rated),
    )


def _before_reduction(choice: Choice, alike: Sequence[int], columns_of: dict[int, IntArray]) -> Choice:
    """A choice among the reduced candidates, with the positions of candidate and columns before the reduction."""
    index = list(columns_of)[choice.candidate]
    return replace(choice, candidate=alike[index], columns=tuple(columns_of[index][list(choice.columns)].tolist()))


def _own_keys(each: Rated | Simplicity) -> tuple[int, int, int]:
    """The keys of the configuration itself."""
    return each.idle, each.interleave, each.axes


def _run(
    rated: Sequence[Rated], at_most: Simplicity | None, solver: SolverName, time_limit: float | None
) -> tuple[Choice | None, Status]:
    """Run the first program, or the second one if `at_most` gives the keys."""
    candidates = [each.candidate for each in rated]
    program = _KeyProgram(rated, lower_bounds(candidates))
    if at_most is None:
        program.minimise_keys()
    else:
        program.allow(at_most)
    outcome = run_solver(program.problem, solver, time_limit)
    if outcome.values is None:
        return None, outcome.status
    c, columns = program.columns(outcome.values)
    seconds = candidates[c].step_seconds(columns)
    return Choice(candidate=c, columns=columns, objective_seconds=seconds), outcome.status


def _least_keys(rated: Rated) -> Simplicity:
    """A lower bound of the keys of a candidate's choices."""
    stage, num_stages, inner = rated.candidate.stage, rated.candidate.num_stages, rated.inner
    risk, repeated = (np.full(num_stages, np.iinfo(np.int64).max) for _ in range(2))
    np.minimum.at(risk, stage, rated.risk)
    np.minimum.at(repeated, stage, rated.repeated)
    even, of_layers = inner & rated.alike, rated.repeated / np.maximum(rated.candidate.layers, 1)
    counts = np.bincount(rated.candidate.layers[even][_firsts(stage[even], rated.candidate.layers[even])])
    is_even = num_stages < 3 or bool(np.any(counts == num_stages - 2))
    return Simplicity(
        risk=int(risk.max()),
        idle=rated.idle,
        recomputed=max(tenths_of(int(repeated.sum()), rated.candidate.num_layers), int(np.ceil(of_layers.min()))),
        interleave=rated.interleave,
        uneven=int(not is_even),
        axes=rated.axes,
    )


def _firsts(stage: IntArray, layers: IntArray) -> IntArray:
    """Positions of the first column of each pair of stage and layers."""
    return np.unique(np.stack([stage, layers]), axis=1, return_index=True)[1]


def _simple_columns(rated: Rated) -> Iterator[IntArray]:
    """Sets of columns under weaker and weaker demands: low risk, no recompute, even stages."""
    inner, layers = rated.inner, rated.candidate.layers
    counts = np.unique(layers[inner & rated.alike]).tolist() if rated.candidate.num_stages > 2 else []
    for risk in np.unique(rated.risk).tolist():
        for most in np.unique([rated.repeated.min(initial=0), rated.repeated.max(initial=0)]).tolist():
            own: Mask = (rated.risk <= risk) & (rated.repeated <= most)
            for count in counts:
                yield np.flatnonzero(own & (~inner | (rated.alike & (layers == count))))
            yield np.flatnonzero(own)
