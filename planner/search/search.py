"""From a job to a plan: candidates, bounds, best-first pricing, the integer program, and why others lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.estimate import Estimate, estimate
from planner.cost.flops import MODEL_FLOPS_CONVENTION
from planner.cost.stage import POLICIES
from planner.errors import InputError, Mistake
from planner.plan import Plan, RunnerUp
from planner.search.candidate import TIE, Candidate, Choice
from planner.search.candidates import (
    DegreeArrays,
    allowed_policies,
    layout_at,
    least_stage_bytes,
    legal_degrees,
    lower_bound_seconds,
    price_candidate,
)
from planner.search.constraints import Constraints
from planner.search.dynamic_program import best_choice
from planner.search.footprint import NothingFits, smallest_footprint
from planner.search.legality import broken_rules
from planner.search.solve import Solution, solve
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.search.integer_program import SolverName
    from planner.specs.job import Job

__all__ = ["Constraints", "NothingFits", "Reporter", "fastest_layout", "plan_for_layout", "search"]


class Reporter:
    """Told what the search does; every method is empty, so that a reporter overrides what it shows."""

    def candidates(self, num_legal: int, num_refused: int) -> None:
        """The outer configurations have been listed."""

    def pruned(self, reason: str, num_pruned: int) -> None:
        """A bound has ruled out configurations."""

    def priced(self, num_priced: int, incumbent_seconds: float) -> None:
        """One more configuration has been priced; `incumbent_seconds` is the best step time so far."""

    def solving(self, solver: str, num_candidates: int) -> None:
        """The integer program starts."""

    def solved(self, status: str, objective_seconds: float, gap: float) -> None:
        """The integer program and its certificate are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What best-first pricing leaves for the integer program."""

    candidates: list[Candidate]
    degrees: list[DegreeArrays]
    choices: list[Choice]
    num_legal: int
    refused: dict[str, int]
    pruned: dict[str, int]


def plan_for_layout(job: Job, layout: Layout) -> Plan:
    """Price one layout without a search; its schedule may be one that the engine does not have, to compare.

    Raises:
        InputError: the layout breaks rules; all of them are named.
    """
    broken = broken_rules(job, layout, except_for=("schedule",))
    if broken:
        raise InputError(*(Mistake(message=f"this layout cannot run: {why}", where="--layout") for why in broken))
    return _plan(job, layout, estimate(job, layout))


def _plan(job: Job, layout: Layout, priced: Estimate, **extra: Any) -> Plan:
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
        low_step_seconds=_scaled(priced.step_seconds, job.calibration.low),
        high_step_seconds=_scaled(priced.step_seconds, job.calibration.high),
        calibration=job.calibration,
        tokens_per_second_per_device=priced.tokens_per_second_per_device,
        mfu=priced.mfu,
        hfu=priced.hfu,
        flops_convention=MODEL_FLOPS_CONVENTION,
        options={
            "headroom": job.headroom,
            "allow_tp_across_nodes": job.allow_tp_across_nodes,
            **extra.pop("options", {}),
        },
        **extra,
    )


def _scaled(seconds: float, factor: float | None) -> float | None:
    return None if factor is None else seconds * factor


def search(
    job: Job,
    constraints: Constraints,
    *,
    solver: SolverName = "cbc",
    time_limit: float | None = None,
    top: int = 3,
    reporter: Reporter | None = None,
) -> Plan | NothingFits:
    """The fastest layout for a job, with its proof, or what is in the way of any.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    reporter = reporter or Reporter()
    _check_pins(job, constraints)
    _check_lists(job, constraints)
    found = _price_best_first(job, constraints, top, reporter)
    if not found.choices:
        return smallest_footprint(job, constraints)
    reporter.solving(solver, len(found.candidates))
    solution = solve(found.candidates, solver=solver, time_limit=time_limit)
    assert solution.choice is not None, "the dynamic program found a choice and the solver none"
    reporter.solved(solution.status, solution.objective_seconds, solution.gap)
    layout = _layout_of(found, solution.choice)
    priced = estimate(job, layout)
    assert abs(priced.step_seconds - solution.objective_seconds) <= 1e-9 * priced.step_seconds, (
        f"the ledger says {priced.step_seconds!r} s, the solver {solution.objective_seconds!r} s"
    )
    losers = _runners_up(found, solution.choice, top)
    return _plan(
        job,
        layout,
        priced,
        runners_up=tuple(_runner_up(job, priced, _layout_of(found, choice)) for choice in losers),
        certificate=_certificate(found, solution),
        options=constraints.to_dict(),
    )


def fastest_layout(job: Job, constraints: Constraints, reporter: Reporter | None = None) -> tuple[Layout, float] | None:
    """The fastest layout and its seconds by the dynamic program alone, or None where nothing fits.

    What `search` finds, without the integer program's proof; for questions that need many answers.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    found = _price_best_first(job, constraints, 0, reporter or Reporter())
    if not found.choices:
        return None
    best = min(found.choices, key=lambda choice: (choice.objective_seconds, choice.candidate))
    return _layout_of(found, best), best.objective_seconds


def _check_pins(job: Job, constraints: Constraints) -> None:
    """Pins on what the engine does not have at all, which no configuration could meet."""
    mistakes = []
    schedule = constraints.value_of("schedule")
    if schedule and schedule not in job.engine.schedules:
        have = ", ".join(job.engine.schedules)
        hint = f"engine {job.engine.name} runs {have}"
        mistakes.append(Mistake(message=f"schedule `{schedule}` is not available", where="--pin", hint=hint))
    for axis in ("tp", "pp", "dp", "cp", "ep", "etp"):
        value = constraints.value_of(axis)
        if value and int(value) > 1 and axis.replace("etp", "ep") not in job.engine.axes:
            hint = f"engine {job.engine.name} runs {', '.join(job.engine.axes)}"
            mistakes.append(Mistake(message=f"`{axis}={value}` is not available", where="--pin", hint=hint))
    policies = (constraints.value_of("recompute") or "none").split("/")
    for policy in sorted(set(policies) - set(job.engine.recompute)):
        hint = f"engine {job.engine.name} has {', '.join(job.engine.recompute)}"
        mistakes.append(Mistake(message=f"recompute `{policy}` is not available", where="--pin", hint=hint))
    if mistakes:
        raise InputError(*mistakes)


def _check_lists(job: Job, constraints: Constraints) -> None:
    """Pinned lists must be ones that the search can choose: right sum, chunks of a stage alike."""
    layers, pp = constraints.per_chunk("layers_per_stage"), constraints.value_of("pp")
    if layers and sum(map(int, layers)) != job.model.num_layers:
        message = f"`layers_per_stage` sums to {sum(map(int, layers))}"
        raise InputError(message, where="--pin", hint=f"the model has {job.model.num_layers} layers")
    for key in ("layers_per_stage", "recompute"):
        values = constraints.per_chunk(key) or ()
        stages = int(pp or len(values) or 1)
        if values != values[:stages] * (len(values) // stages):
            raise InputError(
                f"`{key}={'/'.join(values)}` cannot be planned",
                where="--pin",
                hint="pp * interleave entries; the chunks of one stage are alike",
            )


def _bounded(job: Job, constraints: Constraints) -> tuple[list[tuple[float, DegreeArrays, int]], _Found]:
    """Configurations that may fit, with the lower bound of their step time, best bound first."""
    legal, refused = legal_degrees(job, constraints)
    waiting: list[tuple[float, DegreeArrays, int]] = []
    num_legal = too_big = 0
    policies = [POLICIES.index(p) for p in job.engine.recompute]
    for everything in legal:
        fits = least_stage_bytes(job, everything, policies) <= job.memory_limit_bytes
        num_legal, too_big = num_legal + len(everything), too_big + int(len(everything) - fits.sum())
        degrees = everything.take(fits)
        bounds = lower_bound_seconds(job, degrees)
        waiting += [(float(bound), degrees, i) for i, bound in enumerate(bounds)]
    waiting.sort(key=lambda entry: entry[0])
    found = _Found(
        candidates=[], degrees=[], choices=[], num_legal=num_legal, refused=refused, pruned={"memory": too_big}
    )
    return waiting, found


def _price_best_first(job: Job, constraints: Constraints, top: int, reporter: Reporter) -> _Found:
    """Price configurations in the order of their bounds until none can enter the best `top` + 1.

    The bound of a configuration never exceeds its optimum, so whatever is left unpriced cannot win.
    """
    waiting, found = _bounded(job, constraints)
    reporter.candidates(found.num_legal, sum(found.refused.values()))
    reporter.pruned("memory", found.pruned["memory"])
    best: dict[tuple[int, ...], float] = {}  # the best step time of each way to cut the model
    for position, (bound, arrays, index) in enumerate(waiting):
        cutoff = sorted(best.values())[top] if len(best) > top else np.inf
        if bound > cutoff * (1 + TIE):
            found.pruned["time bound"] = len(waiting) - position
            reporter.pruned("time bound", len(waiting) - position)
            break
        degrees = arrays.take(index)
        policies = allowed_policies(job, constraints, degrees)
        candidate = price_candidate(job, degrees, policies, constraints=constraints, cutoff_seconds=cutoff)
        choice = best_choice(candidate, index=len(found.candidates), cutoff=cutoff)
        if choice is None:
            continue
        found.candidates.append(candidate)
        found.degrees.append(degrees)
        found.choices.append(choice)
        cut = _cut(degrees)
        best[cut] = min(choice.objective_seconds, best.get(cut, np.inf))
        reporter.priced(position + 1, min(best.values()))
    return found


def _cut(degrees: DegreeArrays | Layout) -> tuple[int, ...]:
    """What makes two plans different to a reader: how the model is cut, not how the pieces are timed."""
    return degrees.tp, degrees.pp, degrees.dp, degrees.ep, degrees.zero


def _runners_up(found: _Found, winner: Choice, top: int) -> list[Choice]:
    """The best choices of the `top` next best ways to cut the model."""
    seen = {_cut(found.degrees[winner.candidate])}
    losers: list[Choice] = []
    for choice in sorted(found.choices, key=lambda choice: (choice.objective_seconds, choice.candidate)):
        cut = _cut(found.degrees[choice.candidate])
        if cut not in seen and len(losers) < top:
            seen.add(cut)
            losers.append(choice)
    return losers


def _layout_of(found: _Found, choice: Choice) -> Layout:
    candidate, columns = found.candidates[choice.candidate], list(choice.columns)
    layers, policies = candidate.layers[columns].tolist(), candidate.policy[columns].tolist()
    return layout_at(found.degrees[choice.candidate], layers, policies)


def _runner_up(job: Job, winner: Estimate, layout: Layout) -> RunnerUp:
    """A layout that lost, and the two lines that cost it most against the winner."""
    priced = estimate(job, layout)
    worse = {
        line.name: float(line.exposed_seconds) - float(own.exposed_seconds)
        for line, own in zip(priced.time, winner.time, strict=True)
    }
    most = sorted((name for name in worse if worse[name] > 0), key=lambda name: -worse[name])[:2]
    share = priced.step_seconds / winner.step_seconds - 1
    causes = ", ".join(f"{name.value.replace('_', ' ')} +{format_seconds(worse[name])}" for name in most)
    reason = f"{share:+.1%}" + (f": {causes}" if causes and share > 0 else "")
    return RunnerUp(layout=layout, step_seconds=priced.step_seconds, peak_bytes=priced.peak_bytes, reason=reason)


def _certificate(found: _Found, solution: Solution) -> dict[str, Any]:
    return {
        "status": solution.status,
        "solver": solution.solver,
        "objective_seconds": solution.objective_seconds,
        "gap": solution.gap,
        "dynamic_program_seconds": solution.certificate_seconds,
        "num_legal": found.num_legal,
        "num_refused_by_rule": {name: count for name, count in found.refused.items() if count},
        "num_pruned": found.pruned,
        "num_priced": found.num_legal - sum(found.pruned.values()),
        "num_in_program": len(found.candidates),
        "num_pruned_before_solver": solution.num_pruned_by_bound,
        "num_columns": solution.num_columns,
        "warnings": list(solution.warnings),
    }
