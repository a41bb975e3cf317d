"""Check the optimum against layouts drawn by the rules of `explain`, each priced alone by its ledger.

The integer program and the dynamic program share the listed configurations and the arrays of prices. A rule that drops
the best layout, or an array that makes it dearer, would deceive both. The drawn layouts share neither list nor arrays
with the search: their keys are drawn one by one, `broken_rules` checks each layout, and `estimate` prices it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.estimate import estimate
from planner.cost.segments import with_segment
from planner.layout import Layout, divisors, even_split, format_layout
from planner.search.decision import rank_of
from planner.search.optimum.candidate import Disagreement
from planner.search.space.arrays import AGREEMENT
from planner.search.space.rules import broken_rules

if TYPE_CHECKING:
    from planner.search.best_first import Assigned, Found
    from planner.search.objectives import Objective
    from planner.search.space.space import Space
    from planner.specs.job import Job

NUM_DRAWN: Final = 200
_MOST_TRIED: Final = 50  # draws for each layout that is priced; most draws break a rule
_CHUNKS: Final = (1, 1, 2, 3, 4, 6, 8)


def check_layouts(found: Found, objective: Objective, best: Assigned, *, count: int = NUM_DRAWN) -> int:
    """Price up to `count` drawn layouts and return their number; half of them differ from the best in a key or two.

    Layouts that the search leaves out on purpose are not drawn: other schedules, offload, uneven stages that the best
    layout lacks, and what a pin or a rule of the search excludes. On several pools none is drawn.

    Raises:
        Disagreement: a drawn layout is better than the best, which is a bug.
    """
    job, optimum = found.space.job, found.layout_of(best)
    if len(job.pools) > 1 or optimum.schedule not in ("1f1b", "interleaved"):
        return 0
    pick, seen, rank = np.random.default_rng(0), {optimum}, rank_of(found, objective, best)
    for number in range(count * _MOST_TRIED):
        layout = _drawn(job, optimum, pick, keeps_most=number % 2 == 0)
        if layout is None or layout in seen or not _is_searched(found.space, layout):
            continue
        seen.add(layout)
        priced, devices = estimate(job, layout), objective.devices_of(job, layout)
        first, second = (float(value) for value in objective.rank(priced.step_seconds, devices))
        is_better = first < rank[0] * (1 - AGREEMENT) or (first <= rank[0] and second < rank[1] * (1 - AGREEMENT))
        if is_better and priced.fits and priced.step_seconds <= objective.longest_seconds(devices):
            raise Disagreement(
                f"{format_layout(layout)} takes {priced.step_seconds!r} s by its ledger, is drawn by the rules of "
                f"`explain`, and is better than the optimum {format_layout(optimum)}, {best.seconds!r} s"
            )
        if len(seen) > count:
            break
    return len(seen) - 1


def _drawn(job: Job, optimum: Layout, pick: np.random.Generator, *, keeps_most: bool) -> Layout | None:
    """A layout with random keys; None if they do not divide devices, batch or layers."""
    n, batch, layers = job.cluster.num_devices, job.training.global_batch_size, job.model.num_layers
    few = divisors(n)
    options: dict[str, Any] = {
        "tp": few,
        "cp": few,
        "pp": (*few, *range(1, min(layers, n) + 1)),
        "ep": divisors(job.model.moe.num_experts) if job.model.moe else [1],
        "mbs": divisors(batch),
        "interleave": _CHUNKS,
        "zero": range(4),
        "recompute": job.engine.can.recompute,
    }
    now = {key: getattr(optimum, key) for key in options} | {"recompute": optimum.recompute[0]}
    keys = pick.permutation(list(options)).tolist()[: pick.integers(1, 3) if keeps_most else None]
    now |= {key: options[key][int(pick.integers(len(options[key])))] for key in keys}
    stride, chunks = now["tp"] * now["cp"] * now["pp"], now["pp"] * now["interleave"]
    dp = max((each for each in divisors(batch // now["mbs"]) if each * stride <= n), default=0)
    if not dp or chunks > layers or (now["pp"] == 1 < now["interleave"]):
        return None
    is_as_cut = (now["pp"], now["interleave"]) == (optimum.pp, optimum.interleave)
    split = optimum.layers_per_stage if is_as_cut else even_split(layers, now["pp"], now["interleave"])
    divides = job.training.sequence_length // now["cp"] % now["tp"] == 0
    policy = optimum.recompute if is_as_cut and "recompute" not in keys else (now["recompute"],) * chunks
    layout = Layout(
        **{**now, "recompute": policy},
        dp=dp,
        sp=int(now["tp"] > 1 and divides and 1 in job.engine.can.sp),
        etp=int(pick.choice((1, optimum.etp))) if now["ep"] > 1 else 1,
        schedule="interleaved" if now["interleave"] > 1 else "1f1b",
        offload=optimum.offload,
        layers_per_stage=split,
    )
    return with_segment(job.cluster, replace(layout, segment=0))


def _is_searched(space: Space, layout: Layout) -> bool:
    """Whether rules and pins allow the layout in a search."""
    constraints = space.constraints
    if constraints.lists or constraints.value_of("mtp") or constraints.value_of("loss"):
        return False
    if not constraints.fills_hosts(layout.world_size) or not constraints.allowed(layout):
        return False
    if not all(constraints.allows_policy(policy, layout) for policy in set(layout.recompute)):
        return False
    return not broken_rules(space.job, layout, searched=True)
