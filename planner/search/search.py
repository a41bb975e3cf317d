"""Turn a job into a plan: candidates, bounds, best-first pricing, the integer program, and the runners-up."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.cost.chance import UNLIKELY
from planner.cost.estimate import estimate
from planner.errors import SolverTrouble
from planner.plan_parts import Certificate
from planner.search.best_first import best_first
from planner.search.decision import Decision, best_layout, decide, rank_of
from planner.search.footprint import NothingFits, smallest_footprint
from planner.search.given import plan_of
from planner.search.least_memory import least_peak, within_share
from planner.search.near_ties import minimum, runner_up
from planner.search.objectives import THROUGHPUT, WORTH_READING, AnyLayout, BestKinds, Objective, kind_of, way_of
from planner.search.optimum.candidate import Disagreement
from planner.search.recommendation import Window, recommended
from planner.search.reporter import Reporter
from planner.search.space.arrays import AGREEMENT
from planner.search.space.refusals import check_pins
from planner.search.space.space import Space
from planner.search.time_limit import OutOfTime, TimeLimit
from planner.search.with_runs import with_runs
from planner.specs.job import each_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.layout import Layout
    from planner.plan import Plan
    from planner.plan_parts import Recommendation
    from planner.search.found import Assigned, Found
    from planner.search.optimum.integer_program import SolverName
    from planner.search.space.constraints import Constraints
    from planner.specs.job import Job


def search(
    job: Job,
    constraints: Constraints,
    *,
    objective: Objective = THROUGHPUT,
    solver: SolverName = "cbc",
    time_limit: float | None = None,
    top: int = 3,
    within: float = 0.0,
    check: bool = False,
    reporter: Reporter | None = None,
) -> Plan | NothingFits:
    """The best layout for a job under the objective, with its proof, or the reasons why no layout fits.

    If no layout meets deadline and budget, the answer is the cheapest in time, or else the fastest. If no layout fits
    but some may fit, the answer is the best of the layouts with the greatest chance of fitting.
    within: the plan is the easiest to run of a list of layouts that are worse than the optimum by at most this share
    (`recommendation`); 0 asks for the optimum itself.
    top: number of runners-up; without any, no layout with published runs is looked for either (`with_runs`).
    time_limit: seconds of the search. At the limit the answer is the best layout so far, with its gap to a lower bound.
    check: solve some configurations that lower bounds ruled out (`bound_check`), and price layouts that are drawn by
    the rules of `explain` (`layout_check`).

    Raises:
        InputError: no legal layout exists under the constraints.
        SolverTrouble: the time limit was reached before any layout was found.
        Disagreement: the two methods differ, or a lower bound is above an optimum; a bug.
    """
    reporter = reporter or Reporter()
    space = Space(job, constraints)
    check_pins(space)
    objective.check(job)
    limit = TimeLimit(time_limit)

    def decided(tightened: Callable[[], Job | None]) -> tuple[Found, BestKinds, Decision] | None:
        best = BestKinds(objective, top + 1, within=within)
        with limit.ends():
            tight = tightened()
            if tight is None:
                return None
            found = best_first(space.of(tight), best, reporter, until_interrupted=True)
        if found.bound is not None and not found.layouts:  # interrupted, so nothing says that no layout fits
            raise OutOfTime if found.is_out_of_time else KeyboardInterrupt
        reporter.solving(solver, len(found.near))
        return found, best, decide(found, best, solver, limit.left)

    try:
        answer = decided(lambda: _tightened(space, objective))
        # a request is relaxed only if both methods found nothing
        while answer and not answer[0].layouts and answer[0].pruned.get("deadline") and objective.is_limited:
            objective = objective.relaxed()
            answer = decided(lambda: job)
        if answer and not answer[0].layouts:
            objective = Objective(name=objective.name)
            answer = decided(lambda: _where_likeliest(space))
    except OutOfTime:
        hint = "give it more time, or leave less to choose from: --pin tp=8"
        raise SolverTrouble(f"no layout was found within {time_limit:g} s", where="--time-limit", hint=hint) from None
    if answer is None or not answer[0].layouts:
        return smallest_footprint(space)
    found, best, decision = answer
    winner = best_layout(found, objective)
    deciding = solver if decision.solution.solver == solver else None
    num_checked = num_drawn = 0
    if check:
        from planner.search.bound_check import check_bounds
        from planner.search.layout_check import check_layouts

        num_checked = check_bounds(found, best, solver=deciding)
        num_drawn = check_layouts(found, objective, winner)
    reporter.solved(decision.solution.status, winner.seconds, decision.gap)
    optimum = found.layout_of(winner)
    window = Window(objective=objective, minimum=rank_of(found, objective, winner), within=within)
    complete = decision.solution.is_complete
    chosen, told = recommended(found, window) if within and complete else (winner, None)
    layout = found.layout_of(chosen)
    priced = estimate(job, layout)
    _check_ledger(found, window, chosen, priced.step_seconds, winner)
    losers = [found.layout_of(assigned) for assigned in _runners_up(found, chosen, top, objective)]
    evident = None
    with contextlib.suppress(KeyboardInterrupt), limit.ends():  # the plan is proved; only this search ends early
        evident = with_runs(space, objective, layout, priced.step_seconds, within) if top and complete else None
    return plan_of(
        job,
        layout,
        priced,
        minimum=minimum(job, layout, priced, optimum, objective),
        with_runs=evident,
        runners_up=tuple(runner_up(job, layout, priced, loser, estimate(job, loser), objective) for loser in losers),
        certificate=_certificate(found, decision, winner, objective, (num_checked, num_drawn), told),
        idle_reason=_idle_reason(found, window, layout, optimum),
        options={"objective": objective.name, "within": float(within), **constraints.to_dict()},
    )


def _check_ledger(found: Found, window: Window, chosen: Assigned, own_seconds: float, winner: Assigned) -> None:
    """Check that the ledger of the plan has the step that the solvers saw, and that it is near the minimum's ledger.

    The share above the minimum is computed without `Window`, so that a wrong window shows.
    own_seconds: the step by the ledger of the chosen layout.

    Raises:
        Disagreement: one of these does not hold, which is a bug.
    """
    ranks = []
    for each in (chosen, winner):
        seconds = own_seconds if each == chosen else estimate(found.space.job, found.layout_of(each)).step_seconds
        said = f"the ledger of {found.layout_of(each)} has {seconds!r} s"
        if abs(seconds - each.seconds) > AGREEMENT * seconds:
            raise Disagreement(f"{said}, and the solvers saw {each.seconds!r} s")
        ranks.append(rank_of(found, window.objective, replace(each, seconds=seconds)))
    own, least = ranks
    if not window.objective.is_near(own, least, window.within + AGREEMENT):
        raise Disagreement(f"{found.layout_of(chosen)}: {own} is over {window.within:.2%} above the minimum, {least}")


def _tightened(space: Space, objective: Objective) -> Job:
    """The job; if least memory is the objective, its memory is limited to the need of the smallest layout."""
    if objective.name != "memory":
        return space.job
    least = least_peak(space)
    return space.job if least.share > 1 else within_share(space.job, least.share * (1 + AGREEMENT))


def _where_likeliest(space: Space) -> Job | None:
    """The job with just enough memory for the layouts most likely to fit; None if no layout may fit.

    With a plain limit (`--headroom`) no chance of fitting is computed, so the answer is None. If all layouts have the
    same error distribution, a layout's chance falls as its share of the limit grows. Layouts with offload may have a
    wider distribution; the least share decides for them, too.
    """
    loose = space.of(each_pool(space.job, lambda pool: replace(pool, risk=1 - UNLIKELY)))
    if space.job.headroom is not None or not fits(loose):
        return None
    return within_share(loose.job, least_peak(loose).share * (1 + AGREEMENT))


def _idle_reason(found: Found, window: Window, layout: Layout, optimum: Layout) -> str:
    """Why the plan leaves devices idle; empty if it uses all devices."""
    num_used, objective, most = layout.world_size, window.objective, f"{found.most_devices:,}"
    if num_used == found.space.job.cluster.num_devices:
        return ""
    if num_used == found.most_devices:
        return f"no layout that the rules allow uses more than {num_used:,}"
    if num_used < optimum.world_size:
        return f"the minimum uses {optimum.world_size:,}, and gains at most {100 * window.within:.3g}%"
    in_time, budget = math.isfinite(objective.longest_step_seconds), math.isfinite(objective.most_device_seconds)
    reasons = {
        "cost": "with them a token costs more",
        "gpus": "fewer devices meet the deadline" if in_time else "fewer devices are enough",
        "memory": "layouts on more devices need more memory, or are slower at the same",
    }
    faster = "fits, is faster and keeps to the budget" if budget else "fits and is faster"
    return reasons.get(objective.name, f"no layout on up to {most} {faster}")


def fastest_layout(
    job: Job,
    constraints: Constraints,
    reporter: Reporter | None = None,
    *,
    objective: Objective = THROUGHPUT,
    known: Layout | None = None,
) -> tuple[Layout, float] | None:
    """The best layout and its step seconds, by the dynamic program alone; None if no layout fits in time.

    If a layout fits in time, this is the minimum that `search` finds, without the integer program's proof. Questions
    that need many searches use this function.
    known: a layout near the best one, which makes the search faster. If `known` fits and no layout is better, the
    answer is None.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    best, has_incumbent = BestKinds(objective, 1), False
    if known and (priced := estimate(job, known)).fits:
        best.add(known, objective.devices_of(job, known), priced.step_seconds)
        has_incumbent = True
    found = best_first(Space(job, constraints), best, reporter or Reporter(), has_incumbent=has_incumbent)
    if not found.layouts:
        return None
    fastest = best_layout(found, objective)
    return found.layout_of(fastest), fastest.seconds


def fits(space: Space) -> bool:
    """Whether any layout fits; the search ends with the first layout that does.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    any_layout = AnyLayout()
    best_first(space, any_layout, Reporter())
    return any_layout.found


def _runners_up(found: Found, winner: Assigned, top: int, objective: Objective) -> list[Assigned]:
    """The best layouts of `top` other kinds, unless they are much worse than the best layout.

    The best layout of all comes first, then the best of each other way. Kinds that differ from the winner or from a
    better runner-up in pp alone get the places that are left.
    """
    ranks = {assigned: rank_of(found, objective, assigned) for assigned in found.layouts}
    best, *_ = ranked = sorted(ranks, key=ranks.__getitem__)
    kinds = {kind_of(winner.degrees): winner}
    for assigned in ranked:
        if objective.is_near(ranks[assigned], ranks[best], WORTH_READING):
            kinds.setdefault(kind_of(assigned.degrees), assigned)
    ways = {way_of(kind): kind for kind in reversed(kinds)}  # the first kind of each way, the winner's among them
    others = [kind for kind in kinds if kinds[kind] is not winner]
    others.sort(key=lambda kind: kinds[kind] is not best and ways[way_of(kind)] != kind)
    return sorted((kinds[kind] for kind in others[:top]), key=ranks.__getitem__)


def _certificate(
    found: Found,
    decision: Decision,
    winner: Assigned,
    objective: Objective,
    num_checked: tuple[int, int],
    recommendation: Recommendation | None,
) -> Certificate:
    """The certificate of the choice; its optimum is given in step seconds under every objective."""
    solution = decision.solution
    is_checked = solution.status in ("optimal", "time limit") and solution.solver != "dynamic program"
    return Certificate(
        objective=objective.name,
        status=solution.status,
        solver=solution.solver,
        objective_seconds=winner.seconds,
        gap=decision.gap,
        dynamic_program_seconds=winner.seconds if is_checked else None,
        num_cuts=found.num_cuts,
        num_cuts_pruned=found.num_cuts_pruned,
        num_legal=found.num_legal,
        num_refused_by_rule={name: count for name, count in found.refused.items() if count},
        num_pruned=found.pruned,
        num_priced=found.num_priced,
        num_decided=decision.num_decided,
        num_columns=solution.num_columns,
        num_bounds_checked=num_checked[0],
        num_layouts_drawn=num_checked[1],
        not_searched=found.not_searched,
        warnings=solution.warnings,
        recommendation=recommendation,
    )
