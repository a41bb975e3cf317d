"""Check the optimum against layouts drawn by the rules of `explain`, each priced alone by its ledger.

The integer program and the dynamic program share the listed configurations and the arrays of prices. A rule that drops
the best layout, or an array that makes it dearer, would deceive both. The drawn layouts share neither list nor arrays
with the search: their keys are drawn one by one, `broken_rules` checks each layout, and `estimate` prices it.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.estimate import estimate
from planner.cost.segments import with_segment
from planner.layout import Layout, divisors, even_stages, format_layout
from planner.search.decision import rank_of
from planner.search.optimum.candidate import Disagreement
from planner.search.space.arrays import AGREEMENT
from planner.search.space.degree_rules import searched_ends
from planner.search.space.rules import broken_rules

if TYPE_CHECKING:
    from planner.search.best_first import Assigned, Found
    from planner.search.objectives import Objective
    from planner.search.space.space import Space
    from planner.specs.job import Job

NUM_DRAWN: Final = 200
_MOST_TRIED: Final = 50  # draws for each layout that is priced; most draws break a rule
_KEPT: Final = 12  # of the best layouts drawn
_CHUNKS: Final = (1, 1, 2, 3, 4, 6, 8)


def check_layouts(found: Found, objective: Objective, best: Assigned, *, count: int = NUM_DRAWN) -> int:
    """Price up to `count` drawn layouts and return their number.

    Most differ in a few keys from one of the best layouts drawn so far, the optimum at first. Layouts that the search
    leaves out on purpose are not drawn: other schedules, offload, and what a pin or a rule of the search excludes;
    uneven inner stages that the best layout lacks are not drawn either. On several pools none is drawn.

    Raises:
        Disagreement: a drawn layout is better than the best, or the best breaks a rule, which is a bug.
    """
    job, optimum = found.space.job, found.layout_of(best)
    if broken := broken_rules(job, optimum):
        raise Disagreement(f"the optimum {format_layout(optimum)} cannot run: {broken[0]}")
    if len(job.pools) > 1 or optimum.schedule not in ("1f1b", "interleaved"):
        return 0
    pick, seen, rank = np.random.default_rng(0), {optimum}, rank_of(found, objective, best)
    good: list[tuple[float, float, Layout]] = [(float(rank[0]), float(rank[1]), optimum)]
    for number in range(count * _MOST_TRIED):
        base = good[int(pick.integers(len(good)))][-1]
        layout = _drawn(job, base, pick, keeps_most=number % 4 > 0)
        if layout is None or layout in seen or not _is_searched(found.space, layout):
            continue
        seen.add(layout)
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


def _drawn(job: Job, optimum: Layout, pick: np.random.Generator, *, keeps_most: bool) -> Layout | None:
    """A layout with random keys; None if they do not divide devices, batch or layers.

    Beside keys of a layout, `ends` draws how many layers the chunks with the ends of the model hold, and `border`
    another recompute policy for the last stages.
    """
    n, batch, layers = job.cluster.num_devices, job.training.global_batch_size, job.model.num_layers
    few, policies = divisors(n), job.engine.can.recompute
    options: dict[str, Any] = {
        "tp": few,
        "cp": few,
        "pp": (*few, *range(1, min(layers, n) + 1)),
        "ep": divisors(job.model.moe.num_experts) if job.model.moe else [1],
        "mbs": divisors(batch),
        "interleave": _CHUNKS,
        "zero": range(4),
        "recompute": policies,
    }
    named = [
        *options,
        *(["ends"] if searched_ends(job) else []),
        *(["border"] if job.engine.pipeline.recompute_per_stage else []),
    ]
    keys = pick.permutation(named).tolist()[: pick.integers(1, 4) if keeps_most else pick.integers(4, len(named) + 1)]
    now = {key: getattr(optimum, key) for key in options} | {"recompute": optimum.recompute[0]}
    now |= {key: options[key][int(pick.integers(len(options[key])))] for key in keys if key in options}
    stride, pp, chunks = now["tp"] * now["cp"] * now["pp"], now["pp"], now["pp"] * now["interleave"]
    dp = max((each for each in divisors(batch // now["mbs"]) if each * stride <= n), default=0)
    if not dp or chunks > layers + searched_ends(job) or (pp == 1 < now["interleave"]):
        return None
    is_as_cut = (pp, chunks) == (optimum.pp, optimum.num_chunks)
    split, mtp = optimum.layers_per_stage, optimum.mtp
    if "ends" in keys or not is_as_cut:
        split, mtp = _split(job, chunks if pp > 1 else 1, pick)
    of_stages = optimum.recompute[:pp] if is_as_cut and "recompute" not in keys else (now["recompute"],) * pp
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
    return bool(
        not constraints.lists
        and constraints.allows_ends(layout.num_chunks, layout.mtp_before)
        and constraints.fills_hosts(layout.world_size)
        and constraints.allowed(layout)
        and all(constraints.allows_policy(each, layout) and (is_pinned or space.is_of_use(each)) for each in policies)
        and not broken_rules(space.job, layout, searched=True)
    )
