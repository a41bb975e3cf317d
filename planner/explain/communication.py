"""Each group of a plan: its ranks, links and operations, and the cost of its reductions by other algorithms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pydantic import Field

from planner.cost.collectives import all_reduce_algorithms, group
from planner.cost.ledger import LineName
from planner.explain.operations import operations_of_step
from planner.explain.plan_inputs import job_of
from planner.specs.document import Document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.cost.collectives import Group
    from planner.explain.operations import GroupShape, Operation
    from planner.plan import Plan

_SUMS: Final = ("all-reduce", "reduce-scatter", "all-gather")
"""Operations that are an all-reduce or half of an all-reduce."""


class GroupUse(Document):
    """One operation of a group.

    seconds: the time of one run.
    num_bytes: bytes that one rank holds.
    """

    operation: str
    num_bytes: float
    times_per_step: float
    seconds: float
    seconds_per_step: float


class Algorithm(Document):
    """Seconds of one all-reduce of the group's bytes; null if the links cannot run the algorithm."""

    name: str
    seconds: float | None
    chosen: bool = Field(description="whether the estimate uses this algorithm, the cheapest of NCCL's algorithms")


class GroupReport(Document):
    """One kind of group: all groups of the kind are alike and communicate at the same time."""

    line: str
    experts: bool = Field(description="whether the group moves parameters of routed experts")
    line_busy_seconds: float = Field(
        description="busy seconds of the ledger line, which all groups with its name share"
    )
    line_hidden_seconds: float = Field(description="the part of these seconds that is hidden behind other work")
    pool: str = Field(
        default="", description="on a mixed cluster, the pool that contains the group; empty for a group across pools"
    )
    size: int
    stride: int
    num_groups: int
    first_ranks: tuple[int, ...] = Field(description="ranks of the first group; at most 16 ranks are listed")
    links: tuple[str, ...] = Field(description="levels of the network that the group crosses, innermost first")
    bytes_per_second: float = Field(description="bytes per second that one rank sends in a ring through the group")
    uses: tuple[GroupUse, ...]
    algorithm_bytes: float = Field(
        description="bytes of the all-reduce for which the algorithms are priced; 0 if there is none"
    )
    algorithms: tuple[Algorithm, ...]


class Asynchronous(Document):
    """Savings and cost of asynchronous updates (Hogwild; in practice a parameter server)."""

    saved_seconds: float = Field(description="exposed data-parallel communication of a step")
    saved_share: float
    num_workers: int
    staleness_updates: int = Field(description="updates by others between reading weights and applying a gradient")
    server_seconds: float | None = Field(
        description="seconds of a worker's push and pull, with as many servers as workers"
    )


class Collectives(Document):
    """All groups that communicate, and the alternative of asynchronous updates."""

    groups: tuple[GroupReport, ...]
    asynchronous: Asynchronous | None = Field(description="null without data parallelism")


def collectives_of(plan: Plan) -> Collectives:
    """The communication of every group of the plan in one step.

    Raises:
        InputError: the plan's options are not valid.
    """
    job = job_of(plan)
    operations = operations_of_step(job, plan.layout, plan.time)
    kinds: dict[tuple[LineName, GroupShape, bool], list[Operation]] = {}
    for each in operations:
        kinds.setdefault((each.line, each.where, each.experts), []).append(each)
    groups = tuple(_report(plan, uses) for uses in kinds.values())
    return Collectives(groups=groups, asynchronous=_asynchronous(plan, groups))


def _report(plan: Plan, uses: Sequence[Operation]) -> GroupReport:
    layout, line, where, network = plan.layout, uses[0].line, uses[0].where, uses[0].network
    priced = next(each for each in plan.time if each.name == line)
    found = group(network, where.size, where.stride, segment=layout.segment)
    summed = max((each.num_bytes for each in uses if each.kind in _SUMS), default=0.0)
    inside = where.pool and where.stride < layout.stride("pp")  # otherwise the group is between stages
    first = layout.pools.index(where.pool) * layout.stride("pp") if inside else 0
    ranks = range(first, first + where.size * where.stride, where.stride)
    stages = layout.pools.count(where.pool) if inside else layout.pp
    return GroupReport(
        line=line.value,
        experts=uses[0].experts,
        line_busy_seconds=float(priced.busy_seconds),
        line_hidden_seconds=float(priced.hidden_seconds),
        pool=where.pool,
        size=where.size,
        stride=where.stride,
        num_groups=stages * layout.stride("pp") // (layout.pp if line == LineName.TIED_EMBEDDING else where.size),
        first_ranks=tuple(ranks[:16]),
        links=tuple(level.link.name for level in found.levels),
        bytes_per_second=float(found.bandwidth),
        uses=tuple(
            GroupUse(
                operation=each.kind,
                num_bytes=each.num_bytes,
                times_per_step=each.times,
                seconds=each.seconds,
                seconds_per_step=each.times * each.seconds,
            )
            for each in uses
        ),
        algorithm_bytes=summed,
        algorithms=_algorithms(found, summed) if summed else (),
    )


def _algorithms(where: Group, num_bytes: float) -> tuple[Algorithm, ...]:
    prices = {k: float(v) for k, v in all_reduce_algorithms(where, num_bytes).items()}
    offered = {name: prices[name] for name in ("ring", "tree", "in-network") if name in prices}
    chosen = min(offered, key=lambda name: offered[name])
    return tuple(
        Algorithm(name=name, seconds=seconds if math.isfinite(seconds) else None, chosen=name == chosen)
        for name, seconds in prices.items()
    )


def _asynchronous(plan: Plan, groups: Sequence[GroupReport]) -> Asynchronous | None:
    """Asynchronous updates: on average dp - 1 other workers update the weights before a worker's gradient arrives.

    Source: Recht et al., Hogwild (NIPS 2011); Dean et al., DistBelief (2012); Chen et al. (2016), section 2.
    """
    workers = plan.layout.dp
    line = next((each for each in plan.time if each.name == LineName.DP_COMM), None)
    if workers < 2 or line is None:
        return None
    saved = float(line.exposed_seconds)
    server = [
        each.seconds
        for found in groups
        if found.line == LineName.DP_COMM
        for each in found.algorithms
        if each.name == "parameter-server" and each.seconds is not None
    ]
    return Asynchronous(
        saved_seconds=saved,
        saved_share=saved / plan.step_seconds,
        num_workers=workers,
        staleness_updates=workers - 1,
        server_seconds=max(server, default=None),
    )
