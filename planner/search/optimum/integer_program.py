"""The integer program that chooses the candidate and a column for each of its stages in one solve.

Sets and data: candidates c with L_c layers on stages r = 0 .. S_c - 1; columns k of (c, r) with layers l, seconds t,
pass seconds f, slack seconds h and tail seconds d, that begin in state b of the pattern of layers and end in state e;
constants K_c, steady counts A_c. theta_c and delta_c are lower bounds of the slowest stage and of the longest tail
(`pruning.lower_bounds`).

Variables: w_c in {0, 1} candidate c is chosen; y_crk in {0, 1} stage r of c takes column k; U_c >= 0 seconds of the
bottleneck beyond theta_c; V_c >= 0 seconds of the longest tail beyond delta_c.

    minimise  sum_c [ (K_c + A_c theta_c + delta_c) w_c + A_c U_c + V_c + sum_rk f_crk y_crk ]

    (1) sum_c w_c = 1                                                     -> _choose_one_candidate()
    (2) sum_k y_crk = w_c                           for all c, r          -> _choose_one_column_per_stage()
    (3) sum_rk l_crk y_crk = L_c w_c                for all c             -> _place_every_layer()
    (4) U_c >= sum_k max(t_crk - theta_c, 0) y_crk  for all c, r          -> _wait_for_the_slowest_stage()
    (5) V_c >= sum_k max(d_crk - delta_c, 0) y_crk  for all c, r          -> _wait_for_the_longest_tail()
    (6) U_c + theta_c w_c >= sum_k (t_crk - h_crk) y_crk + sum_k h_csk y_csk  for all c, r; s = S_c - 1
                                                                          -> _wait_for_the_last_chunk()
    (7) sum_{k: e_crk = q} y_crk = sum_{k: b_c,r+1,k = q} y_c,r+1,k  for all c, r < S_c - 1, states q
                                                                          -> _begin_where_the_one_before_ends()
    (8) (K_c + A_c theta_c + delta_c) w_c + A_c U_c + V_c + sum_rk f_crk y_crk <= D_c w_c  for all c with a deadline
                                                                          -> _meet_the_deadline()

Columns of the first stage begin in state 0. If all layers are alike, there is no other state, and (7) is left out. (4),
(5) and (6) are exact: if w_c = 1, exactly one y of the stage is 1, and its column adds max(t, theta) - theta to theta.
This is the disaggregated form (no big-M; Conforti, Cornuejols, Zambelli, Integer Programming, section 4.9): each
candidate's rows are scaled by its own w_c, so the relaxation is the convex hull of the union of the candidates'
relaxations. By (2) w_c is integral if the y are. It is still declared binary, because branching on w_c decides a whole
candidate at once.

Seconds are divided by a unit, so that stage times are near 1e4 and the solver's absolute tolerances of 1e-7 are below
1e-11 of a stage time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from operator import eq, ge, le
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from planner.errors import SolverTrouble
from planner.search.optimum.candidate import Candidate, Choice, Disagreement
from planner.search.optimum.pruning import SLACK, LowerBounds, lower_bounds
from planner.search.optimum.solver_process import run_solver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pulp

    from planner.numbers import FloatArray, IntArray

SolverName = Literal["cbc", "highs"]
Terms: TypeAlias = "list[tuple[pulp.LpVariable, float]]"

_OBJECTIVE = 1e-5
"""Share by which a solver's objective may differ from the step time of its choice, because values are nearly whole."""

_UNITS_OF_SLOWEST = 1e4  # the largest time in the program, in units


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The solver's choice, and its proved bound."""

    choice: Choice | None  # None: nothing found
    status: Literal["optimal", "time limit", "infeasible"]
    bound_seconds: float  # proved: no choice is faster than this, within the solver's tolerance
    num_columns: int


def weighted_sum(terms: Terms) -> Any:
    """A sum of terms: PuLP 3 makes it with the class itself, PuLP 4 with a method of the class."""
    # here, because an import of PuLP takes a tenth of a small plan's time, and a program without a choice needs none
    from pulp import LpAffineExpression

    return getattr(LpAffineExpression, "from_list", LpAffineExpression)(terms)


class JointProgram:
    """The integer program of the module's docstring, as a PuLP problem."""

    def __init__(self, candidates: Sequence[Candidate], bounds: LowerBounds) -> None:
        import pulp

        self._candidates = candidates
        self._bounds = bounds
        slowest = max(float(max(c.seconds.max(), c.tail_seconds.max())) for c in candidates)
        self.unit_seconds = (slowest or 1.0) / _UNITS_OF_SLOWEST
        self.problem = pulp.LpProblem("layout", pulp.LpMinimize)
        self._w = [self._binary(f"w_{c}") for c in range(len(candidates))]
        self._y = [[self._binary(f"y_{c}_{k}") for k in range(each.num_columns)] for c, each in enumerate(candidates)]
        self._slowest = [self.problem.add_variable(f"u_{c}", lowBound=0) for c in range(len(candidates))]
        self._tail = [self.problem.add_variable(f"v_{c}", lowBound=0) for c in range(len(candidates))]
        self._minimise_step_time()
        self._choose_one_candidate()
        for c in range(len(candidates)):
            self._choose_one_column_per_stage(c)
            self._place_every_layer(c)
            self._wait_for_the_slowest_stage(c)
            self._wait_for_the_longest_tail(c)
            self._wait_for_the_last_chunk(c)
            self._begin_where_the_one_before_ends(c)
            self._meet_the_deadline(c)

    def columns(self, values: dict[str, float]) -> tuple[int, tuple[int, ...]]:
        """The chosen candidate and its chosen columns: the variables that are 1 in the solver's `values`, by name.

        Raises:
            SolverTrouble: the values are not a choice.
        """
        chosen = [c for c, w in enumerate(self._w) if values.get(w.name, 0.0) > 0.5]
        if len(chosen) != 1:
            raise SolverTrouble(f"the solver chose {len(chosen)} candidates")
        columns = tuple(k for k, y in enumerate(self._y[chosen[0]]) if values.get(y.name, 0.0) > 0.5)
        if not self._candidates[chosen[0]].is_choice(columns):
            raise SolverTrouble("the solver's answer does not place every layer on one column per stage")
        return chosen[0], columns

    def objective_seconds(self, values: dict[str, float]) -> float:
        """The value of the objective in the solver's `values`, by name, in seconds."""
        terms = self.problem.objective.items()
        return self.unit_seconds * float(sum(factor * values.get(variable.name, 0.0) for variable, factor in terms))

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.problem.add_variable(name, 0, 1, "Binary")

    def _add(self, terms: Terms, sense: Callable[[Any, float], Any], name: str, bound: float = 0) -> None:
        self.problem.addConstraint(sense(weighted_sum(terms), bound), name)

    def _minimise_step_time(self) -> None:
        terms = [term for c in range(len(self._candidates)) for term in self._step_time(c)]
        self.problem.setObjective(weighted_sum(terms))

    def _meet_the_deadline(self, c: int) -> None:
        each, (w, known), *others = self._candidates[c], *self._step_time(c)
        slowest = each.seconds.max() + each.slack_seconds.max()
        most = each.constant_seconds + each.steady_count * slowest + each.tail_seconds.max() + each.pass_seconds.sum()
        if each.longest_seconds < most:  # a deadline of 1e24 s is beyond a solver's numbers, and changes nothing
            self._add([(w, known - each.longest_seconds / self.unit_seconds), *others], le, f"deadline_{c}")

    def _step_time(self, c: int) -> Terms:
        """Terms of a candidate's step time in units, with the term of w_c first. The sum is 0 for an unchosen one."""
        each = self._candidates[c]
        known = each.steady_count * self._bounds.bottleneck[c] + self._bounds.tail[c]
        passes = (each.pass_seconds / self.unit_seconds).tolist()
        return [
            (self._w[c], float(each.constant_seconds + known) / self.unit_seconds),
            (self._slowest[c], each.steady_count),
            (self._tail[c], 1.0),
            *zip(self._y[c], passes, strict=True),
        ]

    def _choose_one_candidate(self) -> None:
        self._add([(w, 1.0) for w in self._w], eq, "one_candidate", 1)

    def _choose_one_column_per_stage(self, c: int) -> None:
        for stage, columns in self._stages(c):
            terms = [(self._y[c][k], 1.0) for k in columns]
            self._add([*terms, (self._w[c], -1.0)], eq, f"column_{c}_{stage}")

    def _place_every_layer(self, c: int) -> None:
        each = self._candidates[c]
        terms = list(zip(self._y[c], each.layers.astype(float).tolist(), strict=True))
        self._add([*terms, (self._w[c], -float(each.num_layers))], eq, f"layers_{c}")

    def _wait_for_the_slowest_stage(self, c: int) -> None:
        beyond = np.maximum(self._candidates[c].seconds - self._bounds.bottleneck[c], 0.0)
        self._wait_for(c, self._slowest[c], beyond, "slowest")

    def _wait_for_the_longest_tail(self, c: int) -> None:
        beyond = np.maximum(self._candidates[c].tail_seconds - self._bounds.tail[c], 0.0)
        self._wait_for(c, self._tail[c], beyond, "tail")

    def _wait_for_the_last_chunk(self, c: int) -> None:
        each, stages = self._candidates[c], self._stages(c)
        own = ((each.seconds - each.slack_seconds) / self.unit_seconds).tolist()
        slack = (each.slack_seconds / self.unit_seconds).tolist()
        last = [(self._y[c][k], -slack[k]) for k in stages[-1][1]]
        known = (self._w[c], float(self._bounds.bottleneck[c]) / self.unit_seconds)
        longest = max(slack[k] for k in stages[-1][1])
        for stage, columns in stages[:-1]:
            if longest > min(slack[k] for k in columns):
                terms = [(self._slowest[c], 1.0), known, *((self._y[c][k], -own[k]) for k in columns), *last]
                self._add(terms, ge, f"last_chunk_{c}_{stage}")

    def _begin_where_the_one_before_ends(self, c: int) -> None:
        each, stages = self._candidates[c], self._stages(c)
        if each.pattern.num_states == 1:
            return
        start = each.start.tolist()
        end = each.pattern.state(each.start + each.layers).tolist()
        for (stage, here), (_, there) in pairwise(stages):
            for state in range(each.pattern.num_states):
                terms = [(self._y[c][k], 1.0) for k in here if end[k] == state]
                terms += [(self._y[c][k], -1.0) for k in there if start[k] == state]
                if terms:
                    self._add(terms, eq, f"state_{c}_{stage}_{state}")

    def _wait_for(self, c: int, longest: pulp.LpVariable, beyond: FloatArray, name: str) -> None:
        units = (beyond / self.unit_seconds).tolist()
        for stage, columns in self._stages(c):
            terms = [(self._y[c][k], -units[k]) for k in columns if units[k] > 0]
            if terms:
                self._add([(longest, 1.0), *terms], ge, f"{name}_{c}_{stage}")

    def _stages(self, c: int) -> list[tuple[int, range]]:
        each = self._candidates[c]
        ends = np.searchsorted(each.stage, np.arange(each.num_stages + 1)).tolist()
        return [(stage, range(ends[stage], ends[stage + 1])) for stage in range(each.num_stages)]


def columns_within(candidates: Sequence[Candidate], upper_bound: float) -> dict[int, IntArray]:
    """For each candidate, the columns that a choice within the upper bound may use, by their lower bounds.

    Candidates without such columns are left out. The function is separate from `pruning.prune`, which the dynamic
    program uses, so that a mistake in one of the two shows as a disagreement.

    Gain (`columns`): 0.67 -> 0.52 s for GPT-3 on 1,024 devices, 2.51 -> 1.59 for DeepSeek-V3 on 11,000.
    """
    limits = [min(upper_bound, each.longest_seconds) * (1 + SLACK) for each in candidates]
    columns = {index: np.arange(each.num_columns) for index, each in enumerate(candidates) if each.num_columns}
    before = None
    while before != (before := sum(map(len, columns.values()))):
        bounds = lower_bounds([candidates[index].keep(kept) for index, kept in columns.items()])
        within = zip(columns.items(), bounds.columns, bounds.candidate, strict=True)
        columns = {
            index: kept[(each < np.inf) & (each <= limits[index])]
            for (index, kept), each, whole in within
            if whole < np.inf and whole <= limits[index]
        }
    return columns


def solve_program(
    candidates: Sequence[Candidate],
    *,
    upper_bound: float | None = None,
    solver: SolverName = "cbc",
    time_limit: float | None = None,
    bounded: bool = True,
) -> Answer:
    """The best choice over all candidates by integer programming.

    Where one column is left for each stage of one candidate, (1) and (2) leave one choice, and no solver is started.

    upper_bound: seconds of a known choice; columns whose lower bound exceeds it are left out.
    time_limit: seconds of wall time for the solver alone.
    bounded: whether times begin at their lower bounds (theta and delta); otherwise the rows alone decide them.

    Raises:
        SolverTrouble: the solver is missing, was killed, or gave an answer that cannot be read.
        EnvironmentProblem: the requested solver could be installed, but is not.
        Disagreement: the program's objective is not the step time of the choice, which is a bug.
    """
    columns_of = columns_within(candidates, np.inf if upper_bound is None else upper_bound)
    alive = list(columns_of)
    kept = [candidates[index].keep(columns) for index, columns in columns_of.items()]
    num_columns = sum(each.num_columns for each in kept)
    if not kept:
        return Answer(choice=None, status="infeasible", bound_seconds=np.inf, num_columns=0)
    only = tuple(range(kept[0].num_stages))
    if bounded and num_columns == len(only) and len(kept) == 1 and kept[0].is_choice(only):
        seconds = kept[0].step_seconds(only)
        best = Choice(candidate=alive[0], columns=tuple(columns_of[alive[0]].tolist()), objective_seconds=seconds)
        return Answer(choice=best, status="optimal", bound_seconds=seconds, num_columns=num_columns)
    bounds = lower_bounds(kept)
    if not bounded:
        bounds = replace(bounds, bottleneck=0 * bounds.bottleneck, tail=0 * bounds.tail)
    program = JointProgram(kept, bounds)
    outcome = run_solver(program.problem, solver, time_limit)
    choice = None
    if outcome.values is not None:
        c, columns = program.columns(outcome.values)
        original = columns_of[alive[c]][list(columns)]
        seconds = candidates[alive[c]].step_seconds(original)
        told = program.objective_seconds(outcome.values)
        if outcome.status == "optimal" and abs(told - seconds) > _OBJECTIVE * seconds:
            name = candidates[alive[c]].name
            raise Disagreement(f"{name}: the program's objective is {told!r} s, and its choice takes {seconds!r} s")
        choice = Choice(candidate=alive[c], columns=tuple(original.tolist()), objective_seconds=seconds)
    bound = float(bounds.candidate.min())
    if choice is not None and outcome.status == "optimal":
        bound = choice.objective_seconds
    elif choice is not None and outcome.bound is not None:
        bound = max(bound, min(outcome.bound * program.unit_seconds, choice.objective_seconds))
    return Answer(
        choice=choice,
        status=outcome.status,
        bound_seconds=np.inf if outcome.status == "infeasible" else bound,
        num_columns=num_columns,
    )
