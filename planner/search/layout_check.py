"""Check the optimum against layouts drawn by the rules of `explain`, each priced alone by its ledger.

The integer program and the dynamic program share the listed configurations and the arrays of prices. A rule that drops
the best layout, or an array that makes it dearer, would deceive both. The drawn layouts share neither list nor arrays
with the search: their keys are drawn one by one, `broken_rules` checks each layout, and `estimate` prices it. Each must
also be among the values that `Space` offers for its keys, whatever it costs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.estimate import estimate
from planner.cost.segments import with_segment
from planner.cost.stage import pattern_of
from planner.layout import Layout, divisors, even_stages, format_layout
from planner.search.decision import rank_of
from planner.search.optimum.candidate import Disagreement
from planner.search.space.arrays import AGREEMENT
from planner.search.space.constraints import Constraints
from planner.search.space.degree_rules import searched_ends
from planner.search.space.rules import broken_rules
from planner.specs.recompute import is_of_some_layers, policy_code

if TYPE_CHECKING:
    from planner.search.found import Assigned, Found
    from planner.search.objectives import Objective
    from planner.search.space.space import Space
    from planner.specs.job import Job

NUM_DRAWN: Final = 200
_MOST_TRIED: Final = 50  # draws for each layout that is priced; most draws break a rule
_KEPT: Final = 12  # of the best layouts drawn
_TRIED_EACH: Final = 20  # draws for each value of a key, until one breaks no rule
_CHUNKS: Final = (1, 1, 2, 3, 4, 6, 8)


def check_layouts(found: Found, objective: Objective, best: Assigned, *, count: int = NUM_DRAWN) -> int:
    """Price up to `count` drawn layouts and return their number.

    Most differ in a few keys from one of the best layouts drawn so far, the optimum at first. Layouts that the search
    leaves out on purpose are not drawn: other schedules, offload, and what a pin or a rule of the search excludes;
    uneven inner stages that the best layout lacks are not drawn either. On several pools none is drawn.

    Before that, a layout is drawn for each value of each key, and is not priced.

    Raises:
        Disagreement: a drawn layout is better than the best or is not offered, or the best breaks a rule: a bug.
    """
    job, optimum = found.space.job, found.layout_of(best)
    if broken := broken_rules(job, optimum):
        raise Disagreement(f"the optimum {format_layout(optimum)} cannot run: {broken[0]}")
    if len(job.pools) > 1 or optimum.schedule not in ("1f1b", "interleaved"):
        return 0
    pick, seen, rank = np.random.default_rng(0), {optimum}, rank_of(found, objective, best)
    _check_values(found.space, optimum)
    good: list[tuple[float, float, Layout]] = [(float(rank[0]), float(rank[1]), optimum)]
    for number in range(count * _MOST_TRIED):
        base = good[int(pick.integers(len(good)))][-1]
        layout = _drawn(job, base, pick, keeps_most=number % 4 > 0)
        if layout is None or layout in seen or not _is_searched(found.space, layout):
            continue
        seen.add(layout)
        _check_offered(found.space, layout)
        priced, devices = estimate(job, layout), objective.devices_of(job, layout)
        first, second = (float(value) for value in objective.rank(priced.step_seconds, devices))
        if priced.fits and priced.step_seconds <= objective.longest_seconds(devices):
            if first < rank[0] * (1 - AGREEMENT) or (first <= rank[0] and second < rank[1] * (1 - AGREEMENT)):
                raise Disagreement(
                    f"{format_layout(layout)} takes {priced.step_seconds!r} s by its ledger, is drawn by the rules of "
                    f"`explain`, and is better than the optimum {format_layout(optimum)}, {best.seconds!r} s"
                )
            good = sorted((*good, (first, second, layout)), key=itemgetter(0, 1))[:_KEPT]
        if len(seen) > count:
            break
    return len(seen) - 1


def _options(job: Job) -> dict[str, Any]:
    """The values to draw for each key, from the rules' own words; most break a rule with most others."""
    few = divisors(job.cluster.num_devices)
    return {
        "tp": few,
        "cp": few,
        "pp": (*few, *range(1, min(job.model.num_layers, job.cluster.num_devices) + 1)),
        "ep": divisors(job.model.moe.num_experts) if job.model.moe else [1],
        "mbs": divisors(job.training.global_batch_size),
        "interleave": _CHUNKS,
        "zero": range(4),
        "recompute": job.engine.can.recompute,
    }


def _drawn(job: Job, optimum: Layout, pick: np.random.Generator, *, keeps_most: bool, **fixed: Any) -> Layout | None:
    """A layout with random keys, but for `fixed` ones; None if they do not divide devices, batch or layers.

    Beside keys of a layout, `ends` draws how many layers the chunks with the ends of the model hold, and `border`
    another recompute policy for the last stages.
    """
    n, batch, layers = job.cluster.num_devices, job.training.global_batch_size, job.model.num_layers
    options, policies = _options(job), job.engine.can.recompute
    named = [
        *options,
        *(["ends"] if searched_ends(job) else []),
        *(["border"] if job.engine.pipeline.recompute_per_stage else []),
    ]
    keys = pick.permutation(named).tolist()[: pick.integers(1, 4) if keeps_most else pick.integers(4, len(named) + 1)]
    now = {key: getattr(optimum, key) for key in options} | {"recompute": optimum.recompute[0]}
    now |= {key: options[key][int(pick.integers(len(options[key])))] for key in keys if key in options} | fixed
    stride, pp, chunks = now["tp"] * now["cp"] * now["pp"], now["pp"], now["pp"] * now["interleave"]
    dp = max((each for each in divisors(batch // now["mbs"]) if each * stride <= n), default=0)
    if not dp or chunks > layers + searched_ends(job) or (pp == 1 < now["interleave"]):
        return None
    is_as_cut = (pp, chunks) == (optimum.pp, optimum.num_chunks)
    split, mtp = optimum.layers_per_stage, optimum.mtp
    if "ends" in keys or not is_as_cut:
        split, mtp = _split(job, chunks if pp > 1 else 1, pick)
    of_stages = optimum.recompute[:pp]
    if not is_as_cut or "recompute" in {*keys, *fixed}:
        of_stages = (now["recompute"],) * pp
    if "border" in keys:
        border = int(pick.integers(pp))
        of_stages = (*of_stages[:border], *(str(pick.choice(policies)),) * (pp - border))
    divides = job.training.sequence_length // now["cp"] % now["tp"] == 0
    layout = Layout(
        **{**now, "recompute": of_stages * now["interleave"]},
        dp=dp,
        sp=int(now["tp"] > 1 and divides and 1 in job.engine.can.sp),
        etp=int(pick.choice((1, optimum.etp))) if now["ep"] > 1 else 1,
        schedule="interleaved" if now["interleave"] > 1 else "1f1b",
        offload=optimum.offload,
        layers_per_stage=split,
        mtp=mtp,
    )
    return with_segment(job.cluster, replace(layout, segment=0))


def _split(job: Job, chunks: int, pick: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of each chunk and the chunk of multi-token prediction: even chunks, or even but for those with an end.

    Few layers stand with the loss; or few with multi-token prediction, and none with the loss.
    """
    layers, apart = job.model.num_layers, int(pick.integers(max(searched_ends(job) - 1, 1)))
    others = chunks - 1 - apart
    if others < 1 or not searched_ends(job) or (chunks <= layers and pick.integers(2)):
        return even_stages(layers, chunks), ()
    held = int(pick.integers(layers // chunks + 1))
    split = even_stages(layers - held, others)
    # with fewer layers than chunks, the embedding stands alone
    return (*sorted(split, reverse=0 not in split), held, *(0,) * apart), (chunks - 2,) * apart


def _is_searched(space: Space, layout: Layout) -> bool:
    """Whether rules and pins allow the layout in a search."""
    constraints, policies = space.constraints, set(layout.recompute)
    is_pinned = constraints.value_of("recompute")
    leading = pattern_of(space.job).leading if layout.schedule == "interleaved" else 0  # the rule `leading_layers`
    return bool(
        not constraints.lists
        and layout.layers_per_stage[0] >= leading
        and constraints.allows_ends(layout.num_chunks, layout.mtp_before)
        and constraints.fills_hosts(layout.world_size)
        and constraints.allowed(layout)
        and all(constraints.allows_policy(each, layout) and (is_pinned or space.is_of_use(each)) for each in policies)
        and not broken_rules(space.job, layout, searched=True)
    )


def _check_values(space: Space, optimum: Layout) -> None:
    """Check for each value of each key one layout that rules and pins allow, if a few draws find one."""
    pick = np.random.default_rng(1)
    for key, values in _options(space.job).items():
        for value in dict.fromkeys(values):
            drawn = (_drawn(space.job, optimum, pick, keeps_most=k % 4 > 0, **{key: value}) for k in range(_TRIED_EACH))
            if layout := next((each for each in drawn if each and _is_searched(space, each)), None):
                _check_offered(space, layout)


def _check_offered(space: Space, layout: Layout) -> None:
    """Check that the lists of `Space` hold a layout that rules and pins allow.

    A policy that recomputes some layers is tried only where memory asks for it, so any other layout may lack it.

    Raises:
        Disagreement: they do not, which is a bug.
    """
    keys = ("tp", "cp", "pp", "dp", "mbs", "interleave", "zero", "ep", "etp")
    pins = Constraints.parse([f"{key}={getattr(layout, key)}" for key in keys]).pins
    own = space.under(replace(space.constraints, pins=(*space.constraints.pins, *pins)))
    codes = {*itertools.filterfalse(is_of_some_layers, map(policy_code, layout.recompute))}
    for block in own.blocks(with_replicas=False):
        here = block.take((block.sp == layout.sp) & (block.mtp_before == layout.mtp_before))
        is_alike = (block.schedule, block.offload) == (layout.schedule, layout.offload)
        if is_alike and len(here) and codes <= own.policies(here).keys():
            return
    raise Disagreement(f"{format_layout(layout)} is drawn by the rules of `explain`, and the search does not try it")
