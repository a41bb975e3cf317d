"""Find the layout nearest to fitting, for jobs for which no layout fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.estimate import estimate, memory_of_stages
from planner.errors import InputError
from planner.layout import even_split, format_layout
from planner.search.bounds.of_memory import least_shares
from planner.search.optimum.pricing import layout_at
from planner.search.space.arrays import TIE
from planner.search.space.placements import roomiest_pools
from planner.search.space.refusals import legal_degrees

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.cost.ledger import StageMemory
    from planner.layout import Layout
    from planner.search.space.configurations import DegreeArrays
    from planner.search.space.space import Space

_NEAREST = 200  # how many configurations, lowest memory bound first, are priced to find the smallest footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """The answer when no layout fits: the layout nearest to fitting, and its memory."""

    layout: Layout
    memory: tuple[StageMemory, ...]


def smallest_footprint(space: Space) -> NothingFits:
    """The layout whose fullest stage needs least memory, of even splits with one recompute policy, or of the pins.

    Raises:
        InputError: no legal layout exists under the constraints.
    """
    job = space.job
    nearest: list[tuple[float, DegreeArrays]] = []
    for degrees in legal_degrees(space, with_replicas=False):
        shares = least_shares(job, degrees)
        order = np.argsort(shares, kind="stable")[:_NEAREST]
        nearest += [(float(shares[i]), degrees.take(int(i))) for i in order]
    nearest.sort(key=lambda entry: entry[0])
    best = (True, np.inf)
    found: list[tuple[tuple[bool, float], Layout, tuple[StageMemory, ...]]] = []
    for least, degrees in nearest[:_NEAREST]:
        if not best[0] and least > best[1] * (1 + TIE):
            break  # all further bounds are at least as high
        for layout in _even_layouts(space, degrees):
            memory = memory_of_stages(job, layout)
            is_over = any(stage.host and stage.host.total_bytes > stage.host.limit_bytes for stage in memory)
            footprint = is_over, max(stage.total_bytes / stage.limit_bytes for stage in memory)
            best = min(best, footprint)
            found.append((footprint, layout, memory))
    if not found:
        raise InputError("the pins leave no recompute policy that this engine has", where="--pin")
    smallest = [(layout, memory) for footprint, layout, memory in found if footprint <= best]
    layout, memory = min(smallest, key=lambda each: (estimate(job, each[0]).step_seconds, format_layout(each[0])))
    return NothingFits(layout=layout, memory=memory)


def _even_layouts(space: Space, degrees: DegreeArrays) -> Iterator[Layout]:
    job, constraints = space.job, space.constraints
    pinned = constraints.per_chunk("layers_per_stage")
    chunks = tuple(map(int, pinned)) if pinned else even_split(job.model.num_layers, degrees.pp, degrees.interleave)
    layers = [sum(chunks[r :: degrees.pp]) for r in range(degrees.pp)]
    pools = roomiest_pools(job, degrees)
    for policy in space.policies(degrees):
        even = layout_at(degrees, layers, [policy] * degrees.pp, pools)
        yield replace(even, layers_per_stage=chunks, recompute=constraints.per_chunk("recompute") or even.recompute)
