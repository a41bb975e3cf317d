"""From a job to a plan: candidates, bounds, best-first pricing, the integer program, and why others lost."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.band import band
from planner.cost.estimate import Estimate, estimate
from planner.cost.flops import flops_convention
from planner.cost.run import price_of
from planner.cost.schedule import EXECUTED
from planner.cost.stage import pattern_of
from planner.errors import InputError, Mistake
from planner.layout import balanced_chunks, format_layout
from planner.made_by import made_by
from planner.plan import Plan
from planner.plan_parts import Certificate, SearchOptions
from planner.search.best_first import Found, best_first
from planner.search.bounds import lower_bounds
from planner.search.candidate import Choice
from planner.search.candidates import layout_at
from planner.search.constraints import Constraints
from planner.search.footprint import NothingFits, smallest_footprint
from planner.search.least_memory import least_peak, within_share
from planner.search.legality import broken_rules
from planner.search.near_ties import runner_up, simplest, why_simpler
from planner.search.objectives import THROUGHPUT, AnyLayout, BestCuts, Objective, Rank, cut_of
from planner.search.placements import most_layers_on, pools_of_stages
from planner.search.reporter import Reporter
from planner.search.solve import AGREEMENT, Solution, solve
from planner.specs.job import MixedJob, pools_of
from planner.specs.load import engine_names, load_engine
from planner.specs.text import any_of

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.search.integer_program import SolverName
    from planner.specs.job import AnyJob

_LISTS = ("layers_per_stage", "recompute")  # pins with an entry for each chunk

__all__ = ["Constraints", "NothingFits", "Reporter", "fastest_layout", "fits", "plan_for_layout", "search"]


def plan_for_layout(job: AnyJob, layout: Layout) -> Plan:
    """Price one layout without a search; its schedule may be one that the engine does not have, to compare.

    Raises:
        InputError: the layout breaks rules; all of them are named.
    """
    broken = broken_rules(job, layout, except_for=("schedule",))
    if broken:
        raise InputError(*(Mistake(message=f"this layout cannot run: {why}", where="--layout") for why in broken))
    return _plan(job, layout, estimate(job, layout))


def _plan(job: AnyJob, layout: Layout, priced: Estimate, **extra: Any) -> Plan:
    spread = band(job, layout)
    return Plan(
        model=job.model,
        cluster=job.cluster,
        training=job.training,
        engine=job.engine,
        layout=layout,
        fits=priced.fits,
        memory=priced.memory,
        time=priced.time,
        step_seconds=priced.step_seconds,
        low_step_seconds=priced.step_seconds * spread.low if spread else None,
        high_step_seconds=priced.step_seconds * spread.high if spread else None,
        band=spread,
        calibration=tuple(each.calibration for each in job.pools) if isinstance(job, MixedJob) else job.calibration,
        tokens_per_second_per_device=priced.tokens_per_second_per_device,
        mfu=priced.mfu,
        hfu=priced.hfu,
        flops_convention=flops_convention(job.training),
        made_by=made_by(job),
        options=SearchOptions(
            headroom=float(job.headroom),
            allow_tp_across_nodes=job.allow_tp_across_nodes,
            allow_offload=job.allow_offload,
            **extra.pop("options", {}),
        ),
        **extra,
    )


def search(
    job: AnyJob,
    constraints: Constraints,
    *,
    objective: Objective = THROUGHPUT,
    solver: SolverName = "cbc",
    time_limit: float | None = None,
    top: int = 3,
    simpler_within: float = 0.0,
    reporter: Reporter | None = None,
) -> Plan | NothingFits:
    """The best layout for a job by the objective, with its proof, or what is in the way of any.

    Where no layout meets the deadline, the fastest one is the answer. simpler_within: the plan may be this much worse
    than the optimum, as a share, where that is simpler (`near_ties`); the certificate is of the optimum.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    reporter = reporter or Reporter()
    check_constraints(job, constraints)
    _check_objective(job, objective)
    found = best_first(
        _tightened(job, constraints, objective),
        constraints,
        BestCuts(objective, top + 1, within=simpler_within),
        reporter,
        until_interrupted=True,
    )
    if not found.choices and found.pruned.get("deadline"):
        found = best_first(
            job, constraints, BestCuts(objective := THROUGHPUT, top + 1, within=simpler_within), reporter
        )
    if not found.choices:
        return smallest_footprint(job, constraints)
    reporter.solving(solver, len(found.candidates))
    solution, winner = _solve_until_interrupted(found, objective, solver, time_limit)
    reporter.solved(solution.status, winner.objective_seconds, solution.gap)
    optimum = layout_of(found, winner)
    seconds = estimate(job, optimum).step_seconds
    assert abs(seconds - winner.objective_seconds) <= 1e-9 * seconds, (
        f"the ledger says {seconds!r} s, the solver {winner.objective_seconds!r} s"
    )
    chosen = _recommended(job, found, winner, objective, simpler_within)
    layout = layout_of(found, chosen)
    priced = estimate(job, layout)
    ranks = _rank(found, objective, chosen), _rank(found, objective, winner)
    losers = [layout_of(found, choice) for choice in _runners_up(found, chosen, top, objective)]
    return _plan(
        job,
        layout,
        priced,
        runners_up=tuple(runner_up(job, layout, priced, loser, estimate(job, loser), objective) for loser in losers),
        certificate=_certificate(found, solution, objective, winner, **_simpler(layout, optimum, ranks)),
        idle_reason=_idle_reason(job, found, layout.world_size, objective),
        options={"objective": objective.name, **constraints.to_dict()},
    )


def _rank(found: Found, objective: Objective, choice: Choice) -> Rank:
    return objective.rank(choice.objective_seconds, objective.devices(found.job, found.degrees[choice.candidate]))


def _recommended(job: AnyJob, found: Found, winner: Choice, objective: Objective, within: float) -> Choice:
    """The simplest of the choices that are not worse than the winner by more than `within`."""
    first, second = _rank(found, objective, winner)
    most = first if objective.name == "gpus" else first * (1 + within), second * (1 + within)
    ranked = [(_rank(found, objective, each), each) for each in found.choices]
    near = [choice for rank, choice in ranked if rank[0] <= most[0] and rank[1] <= most[1]]
    if not within or len(near) < 2:
        return winner
    near.sort(key=lambda choice: _rank(found, objective, choice))
    by_layout = {layout_of(found, choice): choice for choice in [winner, *near]}
    return by_layout[simplest(job, by_layout)]


def _simpler(layout: Layout, optimum: Layout, ranks: tuple[Rank, Rank]) -> dict[str, Any]:
    """For the certificate: how far the plan is from the optimum, and what for; nothing where it is the optimum."""
    if layout == optimum:
        return {}
    chosen, best = ranks
    above = max(mine / least - 1 for mine, least in zip(chosen, best, strict=True))
    return {"above_optimum": above, "optimum": format_layout(optimum), "simpler": why_simpler(layout, optimum)}


def _tightened(job: AnyJob, constraints: Constraints, objective: Objective) -> AnyJob:
    """The job with no more memory than its smallest layout needs, where least memory is the objective."""
    if objective.name != "memory":
        return job
    least = least_peak(job, constraints)
    return job if least.share > 1 else within_share(job, least.share * (1 + AGREEMENT))


def _idle_reason(job: AnyJob, found: Found, num_used: int, objective: Objective) -> str:
    """Why devices are left over; empty when none is."""
    if num_used == job.cluster.num_devices:
        return ""
    if num_used == found.most_devices:
        return f"no layout that the rules allow uses more than {num_used:,}"
    if objective.name == "cost":
        return "with them a token costs more"
    if objective.name == "gpus":
        in_time = math.isfinite(objective.longest_step_seconds)
        return "fewer devices meet the deadline" if in_time else "fewer devices are enough"
    if objective.name == "memory":
        return "layouts on more devices need more memory, or are slower at the same"
    return f"layouts on more devices, up to {found.most_devices:,}, do not fit or are slower"


def _solve(found: Found, objective: Objective, solver: SolverName, time_limit: float | None) -> tuple[Solution, Choice]:
    """The best choice by integer program and certificate, and the same choice in seconds among all candidates."""
    worlds = [objective.devices(found.job, degrees) for degrees in found.degrees]
    best = min(objective.rank(each.objective_seconds, worlds[each.candidate]) for each in found.choices)
    competing = [i for i, world in enumerate(worlds) if objective.competes(world, best)]
    candidates = [found.candidates[i].weighted(objective.weight(worlds[i])) for i in competing]
    solution = solve(candidates, solver=solver, time_limit=time_limit)
    assert solution.choice is not None, "the dynamic program found a choice and the solver none"
    index, columns = competing[solution.choice.candidate], solution.choice.columns
    seconds = found.candidates[index].step_seconds(columns)
    return solution, Choice(candidate=index, columns=columns, objective_seconds=seconds)


def _solve_until_interrupted(
    found: Found, objective: Objective, solver: SolverName, time_limit: float | None
) -> tuple[Solution, Choice]:
    """As `_solve`. After Ctrl-C the best that is known, with what a bound says of it and never the word optimal."""
    best = min(found.choices, key=lambda choice: (*_rank(found, objective, choice), choice.candidate))
    bound = found.bound
    try:
        if bound is None:
            return _solve(found, objective, solver, time_limit)
    except KeyboardInterrupt:
        worlds = np.array([objective.devices(found.job, degrees) for degrees in found.degrees])
        bound = float(np.min(objective.rank(lower_bounds(found.candidates).candidate, worlds)[0]))
    place = _rank(found, objective, best)[0]
    solution = Solution(
        choice=best,
        status="interrupted",
        objective_seconds=best.objective_seconds,
        gap=1 - min(bound, place) / place,
        certificate_seconds=None,
        num_candidates=len(found.candidates),
        num_pruned_by_bound=0,
        num_columns=0,
        solver="dynamic program",
        warnings=("interrupted: the best layout until then",),
    )
    return solution, best


def fastest_layout(
    job: AnyJob,
    constraints: Constraints,
    reporter: Reporter | None = None,
    *,
    objective: Objective = THROUGHPUT,
    known: Layout | None = None,
) -> tuple[Layout, float] | None:
    """The best layout and its seconds by the dynamic program alone, or None where nothing fits, or in time.

    What `search` finds, without the integer program's proof; for questions that need many answers. known: a layout
    that is near the best, so that better ones are quicker to find; where it fits and there is none, the answer is None.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    best, has_incumbent = BestCuts(objective, 1), False
    if known and (priced := estimate(job, known)).fits:
        best.add(known, objective.devices_of(job, known), priced.step_seconds)
        has_incumbent = True
    found = best_first(job, constraints, best, reporter or Reporter(), has_incumbent=has_incumbent)
    if not found.choices:
        return None
    choice = min(found.choices, key=lambda choice: (_rank(found, objective, choice), choice.candidate))
    return layout_of(found, choice), choice.objective_seconds


def fits(job: AnyJob, constraints: Constraints) -> bool:
    """Whether any layout fits; the search ends with the first one.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    any_layout = AnyLayout()
    best_first(job, constraints, any_layout, Reporter())
    return any_layout.found


def check_constraints(job: AnyJob, constraints: Constraints) -> None:
    """Refuse pins that no configuration could meet.

    Raises:
        InputError: the engine does not have what is pinned, or a pinned list cannot be chosen.
    """
    _check_pins(job, constraints)
    _check_lists(job, constraints)
    _check_pools(job, constraints)


def _check_objective(job: AnyJob, objective: Objective) -> None:
    """The pools of a mixed cluster have prices, all of them or none."""
    priced = {pool.cluster.name: price_of(pool.cluster, job.training) is not None for pool in pools_of(job)}
    if objective.name == "cost" and len(set(priced.values())) > 1:
        missing = next(name for name, given in priced.items() if not given)
        hint = f"--set '{missing}.price=2.50 USD/h', or --set 'training.price=2 USD/h' for all devices"
        raise InputError(f"pool {missing} has no price, and others have", where="--objective cost", hint=hint)


def _check_pools(job: AnyJob, constraints: Constraints) -> None:
    """What a mixed cluster cannot be planned with; a pinned list must be of its pools, each one's stages neighbours."""
    schedule = constraints.value_of("schedule")
    if isinstance(job, MixedJob) and schedule in EXECUTED:
        hint = "`planner explain MODEL CLUSTER --layout pp=2,pools=...,schedule=...` prices it"
        raise InputError(f"schedule `{schedule}` is not searched on a mixed cluster", where="--pin", hint=hint)
    most = most_layers_on(len(pools_of(job)))
    if isinstance(job, MixedJob) and job.model.num_layers > most:
        message = f"{len(job.pools)} pools are planned for models of up to {most} layers, not {job.model.num_layers}"
        raise InputError(message, where=job.cluster.name, hint="join pools that are much alike, or leave one out")
    pinned = constraints.value_of("pools")
    if pinned is None:
        return
    known = [pool.cluster.name for pool in pools_of(job)] if isinstance(job, MixedJob) else []
    runs = [name for name, _ in groupby(pinned.split("/"))]
    unknown = sorted(set(runs) - set(known))
    if unknown:
        hint = f"pools are {', '.join(known)}" if known else "the cluster is of one kind and has no pools"
        raise InputError(f"unknown pool `{unknown[0]}`", where="--pin", hint=hint)
    if len(set(runs)) < len(runs):
        raise InputError(f"`pools={pinned}`: the stages of one pool are neighbours", where="--pin")


def _check_pins(job: AnyJob, constraints: Constraints) -> None:
    """Pins on what the engine does not have at all, which no configuration could meet."""
    policies = (constraints.value_of("recompute") or "none").split("/")
    asked = [("schedule", constraints.value_of("schedule"), "schedules")]
    asked += [("offload", constraints.value_of("offload"), "offload")]
    asked += [("recompute", policy, "recompute") for policy in sorted(set(policies))]
    mistakes = [_lacking(job, key, value, field) for key, value, field in asked if value]
    for axis in ("tp", "pp", "dp", "cp", "ep", "etp"):
        value = constraints.value_of(axis)
        if value and int(value) > 1:
            mistakes.append(_lacking(job, axis, axis, "axes"))
    found = [mistake for mistake in mistakes if mistake]
    if len(set(policies)) > 1 and not job.engine.recompute_per_stage:
        message = f"engine {job.engine.name} has one recompute policy for all stages"
        found.append(Mistake(message=message, where="--pin", hint="pin one policy, such as recompute=full"))
    if found:
        raise InputError(*found)


def _lacking(job: AnyJob, key: str, value: str, field: str) -> Mistake | None:
    """The mistake of pinning what the engine's profile does not list in `field`; None where it does."""
    have = getattr(job.engine, field)
    if value in have:
        return None
    others = [name for name in engine_names() if value in getattr(load_engine(name), field)]
    elsewhere = f"; --engine {any_of(others)} has `{value}`" if others else ""
    what, offered = (f"`{key}`", "") if field == "axes" else (f"{key} `{value}`", f"{key}=")
    message = f"engine {job.engine.name} does not have {what}"
    return Mistake(message=message, where="--pin", hint=f"it has {offered}{any_of(have)}{elsewhere}")


def _check_lists(job: AnyJob, constraints: Constraints) -> None:
    """Pinned lists must be ones that the search can choose: right sum, chunks of a stage alike."""
    schedule, given = constraints.value_of("schedule"), [key for key in _LISTS if constraints.per_chunk(key)]
    if schedule in EXECUTED and given:
        hint = f"`planner explain MODEL CLUSTER --layout schedule={schedule},...` prices any layers and recompute"
        raise InputError(f"`{given[0]}` is not chosen with schedule {schedule}", where="--pin", hint=hint)
    layers, pp = constraints.per_chunk("layers_per_stage"), constraints.value_of("pp")
    if layers and sum(map(int, layers)) != job.model.num_layers:
        message = f"`layers_per_stage` sums to {sum(map(int, layers))}"
        raise InputError(message, where="--pin", hint=f"the model has {job.model.num_layers} layers")
    for key in _LISTS:
        values = constraints.per_chunk(key) or ()
        stages = int(pp or len(values) or 1)
        chunks, alike = len(values) // stages, values[:stages]
        wanted = alike * chunks
        if key == "layers_per_stage":
            sums = tuple(sum(map(int, values[stage::stages])) for stage in range(stages))
            wanted = tuple(map(str, balanced_chunks(sums, chunks)))
        if values != wanted:
            hint = "pp * interleave entries; the chunks of one stage are alike, or first ones have one layer more"
            raise InputError(f"`{key}={'/'.join(values)}` cannot be planned", where="--pin", hint=hint)
        if key == "layers_per_stage" and chunks > 1 and pattern_of(job).period > 1 and len(set(values)) > 1:
            message = f"kinds of layers repeat in {job.model.name}: its interleaved chunks are planned of equal size"
            hint = "`planner explain MODEL CLUSTER --layout layers_per_stage=...` prices any"
            raise InputError(message, where="--pin", hint=hint)


def _runners_up(found: Found, winner: Choice, top: int, objective: Objective) -> list[Choice]:
    """The best choices of the `top` next best ways to cut the model."""
    seen = {cut_of(found.degrees[winner.candidate])}
    losers: list[Choice] = []
    for choice in sorted(found.choices, key=lambda each: (_rank(found, objective, each), each.candidate)):
        cut = cut_of(found.degrees[choice.candidate])
        if cut not in seen and len(losers) < top:
            seen.add(cut)
            losers.append(choice)
    return losers


def layout_of(found: Found, choice: Choice) -> Layout:
    candidate, columns = found.candidates[choice.candidate], list(choice.columns)
    layers, policies = candidate.layers[columns].tolist(), candidate.policy[columns].tolist()
    degrees = found.degrees[choice.candidate]
    return layout_at(degrees, layers, policies, pools_of_stages(found.job, degrees))


def _certificate(found: Found, solution: Solution, objective: Objective, winner: Choice, **simpler: Any) -> Certificate:
    """What proves the choice, in seconds of a step whatever the objective."""
    weight = objective.weight(objective.devices(found.job, found.degrees[winner.candidate]))
    certified = solution.certificate_seconds
    return Certificate(
        objective=objective.name,
        status=solution.status,
        solver=solution.solver,
        objective_seconds=winner.objective_seconds,
        gap=solution.gap,
        dynamic_program_seconds=None if certified is None else certified / weight,
        num_cuts=found.num_cuts,
        num_cuts_pruned=found.num_cuts_pruned,
        num_legal=found.num_legal,
        num_refused_by_rule={name: count for name, count in found.refused.items() if count},
        num_pruned=found.pruned,
        num_priced=found.num_priced,
        num_in_program=len(found.candidates),
        num_pruned_before_solver=solution.num_pruned_by_bound,
        num_columns=solution.num_columns,
        warnings=solution.warnings,
        **simpler,
    )
