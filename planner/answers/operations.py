"""The collectives and sends of one step, whose sums are the communication lines of the time ledger."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.ledger import LineName
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import num_updates
from planner.cost.stage import Stage, pool_indices, stages_of
from planner.cost.traffic import network_of, priced
from planner.cost.transfers import transfers

if TYPE_CHECKING:
    from planner.cost.ledger import TimeLine
    from planner.cost.transfers import Transfer
    from planner.layout import Layout
    from planner.specs.cluster import ClusterSpec
    from planner.specs.job import Job, PoolJob


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A kind of group: `size` ranks, each `stride` from the next.

    pool: on a mixed cluster, the pool that contains the group; empty if the group spans two pools.
    """

    size: int
    stride: int
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kind of collective or send.

    line: the ledger line of the operation.
    num_bytes: bytes that one rank holds, as in cost/collectives.py.
    times: number of runs per step on the stage of the ledger line.
    seconds: the time of one run.
    network: the network that it uses: the cluster, the pool, or the link between pools.
    experts: whether it moves parameters of routed experts.
    """

    line: LineName
    kind: str
    where: GroupShape
    num_bytes: float
    times: float
    seconds: float
    network: ClusterSpec
    experts: bool = False


def stage_at(stages: Stage, index: int) -> Stage:
    """The stage at `index` of an array of stages."""
    whole = np.shape(stages.index)
    values = {f.name: getattr(stages, f.name) for f in fields(Stage)}
    return Stage(**{k: None if v is None else np.broadcast_to(v, whole)[index] for k, v in values.items()})


def operations_of_step(job: Job, layout: Layout, time: tuple[TimeLine, ...]) -> tuple[Operation, ...]:
    """Every kind of collective and send on the stages that the lines of `time` describe.

    The slowest stage supplies the operations of every microbatch, and the stage that ends last the operations that run
    once per step. For each line, the sum of times * seconds is its busy time, minus the copies within the device (the
    engine's reduction_bytes), which use no link.
    """
    stages, of_stage = stages_of(job, layout), pool_indices(job, layout)
    slow, last = (
        next(line.stage for line in time if line.name == name) for name in (LineName.COMPUTE, LineName.DP_COMM)
    )
    jobs = [job.pools[of_stage[stage]] for stage in (slow, last)]
    often = [(num_microbatches(job, layout), 0.0), (0.0, num_updates(job, layout))]
    lists = [
        priced(own, transfers(own, layout, stage_at(stages, stage)))
        for own, stage in zip(jobs, (slow, last), strict=True)
    ]
    return tuple(
        _operation(own, each, times, seconds)
        for kind in zip(*lists, strict=True)
        for own, counts, (each, seconds) in zip(jobs, often, kind, strict=True)
        if (times := float(each.times_per_step(*counts))) > 0
    )


def _operation(job: PoolJob, each: Transfer, times: float, seconds: float) -> Operation:
    where = each.where
    pool = job.cluster.name if job.between is not None and not where.across else ""
    return Operation(
        line=each.line,
        kind=each.kind,
        where=GroupShape(size=int(where.size), stride=int(where.stride), pool=pool),
        num_bytes=float(each.num_bytes),
        times=times,
        seconds=float(seconds),
        network=network_of(job, where),
        experts=each.experts,
    )
