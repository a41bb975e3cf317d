"""Check lower bounds against exact optima, by solving a sample of the configurations that bounds ruled out.

The integer program and the dynamic program share the lower bounds, so neither would notice a bound that is too high.
Half of the sample is the configurations nearest to the time or memory limit. The other half is random.

Both methods solve each of them, without a cutoff, and must agree. In the search itself the bounds often leave one
choice, and a wrong constraint or coefficient of the integer program could not show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.schedule import EXECUTED
from planner.errors import SolverTrouble
from planner.search.bounds.of_memory import least_shares, may_fit
from planner.search.bounds.of_pools import PoolBounds, placed
from planner.search.bounds.of_steps import least_seconds_of_any_policy, replicas_bound_seconds
from planner.search.least_memory import least_of
from planner.search.near import candidates_of
from planner.search.optimum.candidate import Disagreement
from planner.search.optimum.dynamic_program import best_choice
from planner.search.optimum.executed_schedules import busy_seconds
from planner.search.optimum.integer_program import solve_program
from planner.search.optimum.pruning import SLACK, lower_bounds, may_hold_all
from planner.search.space.arrays import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.numbers import FloatArray
    from planner.search.found import Found
    from planner.search.objectives import Incumbents
    from planner.search.optimum.candidate import Candidate, Choice
    from planner.search.optimum.integer_program import SolverName
    from planner.search.space.configurations import DegreeArrays, PolicyMasks
    from planner.search.space.space import Space

NUM_CHECKED: Final = 64
_NUM_PARTITIONS: Final = 96  # partitions of the devices to draw configurations from; half have the lowest bounds
_MOST_PLACEMENTS: Final = 8  # placements on pools of which the least memory is computed
_MOST_UNHELD: Final = 128  # configurations of a block that no bound but memory's rules out, evenly spaced
_NUM_NEAR: Final = 4  # configurations that no bound ruled out, which both methods solve without a cutoff, too
_MOST_COLUMNS: Final = 1_000  # of a configuration that the integer program solves as well
_MOST_SECONDS: Final = 5.0  # of this integer program
_MOST_BOUNDED: Final = 5_000  # configurations to bound, evenly spaced if these partitions have more; fewer with pools


@dataclass(frozen=True, slots=True, kw_only=True)
class _RuledOut:
    """Configurations that a bound rules out, and the ratio of each bound to the limit, [n]."""

    degrees: DegreeArrays
    excess: FloatArray


def check_bounds(
    found: Found,
    best: Incumbents,
    *,
    solver: SolverName | None = None,
    count: int = NUM_CHECKED,
    seed: int = 0,
) -> int:
    """Solve up to `count` ruled-out configurations, compare each bound with the optimum, and return their number.

    solver: the solver of the integer program that decided; None if the dynamic program decided alone.

    Raises:
        Disagreement: a bound is above an optimum, or the two methods differ, which is a bug; the message has both
            values.
    """
    pick = np.random.default_rng(seed)
    blocks = list(_ruled_out(found, best, pick))
    of_block = [(number, row) for number, block in enumerate(blocks) for row in range(len(block.excess))]
    order = np.argsort(np.concatenate([np.zeros(0), *(block.excess for block in blocks)]), kind="stable")
    nearest, others = order[: count // 2], pick.permutation(order[count // 2 :])
    chosen = np.concatenate([nearest, others[: count - len(nearest)]]).tolist()
    for number, row in (of_block[position] for position in chosen):
        _check(found, best, solver, blocks[number].degrees.take([row]))
    for position in np.argsort(found.near.seconds, kind="stable")[:_NUM_NEAR].tolist():
        _solved(found.space, solver, found.near.one(position).at_once())
    return len(chosen)


def _solved(space: Space, solver: SolverName | None, one: DegreeArrays) -> tuple[Candidate, Choice | None]:
    """One configuration as a candidate without a cutoff, and its optimum, on which both methods agree."""
    (candidate,) = candidates_of(space, one, np.array([np.inf]))
    choice = best_choice(candidate)
    _check_program(candidate, choice.objective_seconds if choice else np.inf, solver)
    return candidate, choice


def _ruled_out(found: Found, best: Incumbents, pick: np.random.Generator) -> Iterator[_RuledOut]:
    """Configurations that bounds keep from the solvers, from a sample of the partitions of the devices."""
    space, job, partitions = found.space, found.space.job, found.space.partitions()
    order = np.argsort(PoolBounds(job, partitions).partition_bound_seconds(partitions), kind="stable")
    near, rest = order[: _NUM_PARTITIONS // 2], order[_NUM_PARTITIONS // 2 :]
    chosen = np.concatenate([near, pick.permutation(rest)[: _NUM_PARTITIONS - len(near)]])
    blocks = [space.with_policies(each) for each in space.complete(partitions.take(chosen))]
    stride = max(1, sum(map(len, blocks)) * len(job.pools) ** 3 // _MOST_BOUNDED)  # each placement is bounded too
    for block in blocks:
        degrees = block.take(slice(int(pick.integers(stride)), None, stride))
        policies = space.policies(degrees)
        if not len(degrees) or not policies:
            continue
        fits = may_fit(job, degrees, list(policies))
        full = degrees.take(~fits)
        yield _RuledOut(degrees=full, excess=least_shares(job, full))
        bounded, seconds = _bounded(space, degrees.take(fits))
        unheld = np.flatnonzero(np.isinf(seconds))
        _check_unheld(space, bounded.take(unheld[:: max(1, -(-len(unheld) // _MOST_UNHELD))]))
        cutoff = np.broadcast_to(best.cutoff_seconds(best.devices(job, bounded)), seconds.shape)
        beyond = np.isfinite(seconds) & (seconds > cutoff)
        yield _RuledOut(degrees=bounded.take(beyond), excess=seconds[beyond] / cutoff[beyond])


def _check_unheld(space: Space, degrees: DegreeArrays) -> None:
    """Check that configurations whose bound is infinite have no choice: their stages cannot hold all layers."""
    for candidate in candidates_of(space, degrees, np.full(len(degrees), np.inf)) if len(degrees) else ():
        if may_hold_all(candidate) and (choice := best_choice(candidate)):
            raise Disagreement(f"{candidate.name}: its bound is infinite, its optimum {choice.objective_seconds!r} s")


def _bounded(space: Space, degrees: DegreeArrays) -> tuple[DegreeArrays, FloatArray]:
    """The configurations with each of their placements, and the tightest bound of each, [n]."""
    policies, no_cutoff = space.policies(degrees), np.full(len(degrees), np.inf)
    if degrees.schedule in EXECUTED:
        return degrees, busy_seconds(space.job.pools[0], degrees, policies)
    return placed(space, degrees, policies, no_cutoff)


def _check_program(candidate: Candidate, optimum: float, solver: SolverName | None) -> None:
    """Compare the dynamic program's optimum of one configuration with the integer program's, without any cutoff.

    A program that is large or takes long leaves the configuration unchecked.
    """
    if solver is None or candidate.num_columns > _MOST_COLUMNS:
        return
    try:
        answer = solve_program([candidate], solver=solver, time_limit=_MOST_SECONDS, bounded=False)
    except SolverTrouble as trouble:
        raise Disagreement(f"{candidate.name}: {trouble}") from trouble
    seconds = answer.choice.objective_seconds if answer.choice else np.inf
    differs = seconds != optimum and not abs(seconds - optimum) <= AGREEMENT * optimum
    if answer.status != "time limit" and differs:
        said = f"the integer program's optimum is {seconds!r} s, the dynamic program's {optimum!r} s"
        raise Disagreement(f"{candidate.name}: {said}")


def _check(found: Found, best: Incumbents, solver: SolverName | None, one: DegreeArrays) -> None:
    """Compare every bound of one configuration (arrays of length one) with its optimum over splits and recompute."""
    space, job = found.space, found.space.job
    unplaced = replace(one, placement=0 * one.placement)
    policies = space.policies(one)
    candidate, choice = _solved(space, solver, one)
    optimum = choice.objective_seconds if choice else np.inf
    lower, cutoff = PoolBounds(job, one), np.array([np.inf])
    bounds = {
        "of the partition": lower.partition_bound_seconds(one),
        "with any experts": lower.timing_bound_seconds(one, any_experts=True),
        "of layers": lower.timing_bound_seconds(one),
        "of columns": lower_bounds([candidate]).candidate if candidate.num_columns else np.zeros(1),
    }
    if choice:
        bounds["of the optimum's columns"] = lower_bounds([candidate]).columns[0][list(choice.columns)]
    if one.schedule in EXECUTED:
        bounds["of the busiest stage"] = busy_seconds(job.pools[0], one, policies)
    else:
        alone = replace(one, hsdp=np.ones_like(one.hsdp))
        bounds["with any replicas"] = lower.sharded_bound_seconds(alone, policies, cutoff)
        placements, seconds = placed(space, unplaced, policies, cutoff)
        bounds["of the step"] = seconds[placements.placement == one.placement]
        if len(job.pools) == 1:
            bounds["of any recompute policy"] = least_seconds_of_any_policy(job.pools[0], alone, cutoff)
            bounds["of its replicas"] = replicas_bound_seconds(job.pools[0], one, policies, cutoff)
        _check_cutoff(space, best, one, unplaced, optimum)
        _check_memory(space, one, unplaced, policies)
    for name, values in bounds.items():
        if float(np.max(values, initial=0.0)) > optimum * (1 + SLACK):
            raise Disagreement(f"{candidate.name}: the lower bound {name} is {values} s, and its optimum {optimum!r} s")


def _check_cutoff(space: Space, best: Incumbents, one: DegreeArrays, unplaced: DegreeArrays, optimum: float) -> None:
    """Check the bound that stops early at a cutoff: it may rule out only configurations beyond the cutoff."""
    cutoff = np.broadcast_to(best.cutoff_seconds(best.devices(space.job, one)), (1,)).astype(np.float64)
    placements, seconds = placed(space, unplaced, space.policies(one), cutoff)
    left = seconds[placements.placement == one.placement]
    if optimum <= cutoff[0] and not np.any(left <= cutoff[0] * (1 + SLACK)):
        raise Disagreement(f"{one}: a bound rules it out at {cutoff[0]!r} s, and its optimum is {optimum!r} s")


def _check_memory(space: Space, one: DegreeArrays, unplaced: DegreeArrays, policies: PolicyMasks) -> None:
    """Compare the memory bound of the fullest stage with the exact least value over all splits and policies."""
    bound = float(least_shares(space.job, one)[0])
    least = least_of(space, unplaced, np.inf, most_placements=_MOST_PLACEMENTS).share
    if bound > least * (1 + SLACK) or (least <= 1 and not may_fit(space.job, one, list(policies))[0]):
        raise Disagreement(f"{one}: its fullest stage needs at least {bound!r} of a device by the bound, and {least!r}")
