"""The collectives and sends of one step, one by one: what the lines of the time ledger are sums of."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.adapters import frozen_bytes, trained_params
from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    group,
    reduce_scatter_seconds,
    ring_exchange_seconds,
    send_seconds,
)
from planner.cost.layers import tokens_per_microbatch
from planner.cost.ledger import LineName
from planner.cost.parameters import cross_attention_share, embedding_params_on_device
from planner.cost.prices import num_microbatches
from planner.cost.stage import (
    Stage,
    expert_shard_degree,
    holds_embedding,
    holds_head,
    layer_kinds,
    pool_indices,
    shard_degree,
    stages_of,
)
from planner.cost.transfers import context_bytes
from planner.layout import head_stage
from planner.specs.job import pools_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.cost.ledger import TimeLine
    from planner.layout import Layout
    from planner.specs.cluster import ClusterSpec
    from planner.specs.job import AnyJob, Job

__all__ = ["GroupShape", "Operation", "operations_of_step", "stage_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A kind of group: `size` ranks, each `stride` from the next.

    pool: on a mixed cluster the pool that the group lies in; empty where it crosses from one to another.
    """

    size: int
    stride: int
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kind of collective or send.

    line: the ledger line that it belongs to. num_bytes: what one rank holds of it, as in cost/collectives.py.
    times: how often the stage of the ledger line runs it in a step. seconds: of one. network: what it goes through:
    the cluster, or the pool, or the link between pools. experts: it works on the parameters of routed experts.
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
    """One stage of an array of them."""
    whole = np.shape(stages.index)
    values = {f.name: getattr(stages, f.name) for f in fields(Stage)}
    return Stage(**{k: None if v is None else np.broadcast_to(v, whole)[index] for k, v in values.items()})


def operations_of_step(job: AnyJob, layout: Layout, time: tuple[TimeLine, ...]) -> tuple[Operation, ...]:
    """Every kind of collective and send of the stages that the lines of `time` are about.

    For each line the sum of times * seconds is its busy time.
    """
    stages, pools, of_stage = stages_of(job, layout), pools_of(job), pool_indices(job, layout)
    slow, last = (
        stage_at(stages, next(line.stage for line in time if line.name == name))
        for name in (LineName.COMPUTE, LineName.DP_COMM)
    )
    of_slow, of_last = (pools[of_stage[int(stage.index)]] for stage in (slow, last))
    found = (
        *_tensor(of_slow, layout, slow),
        *_context(of_slow, layout, slow),
        *_experts(of_slow, layout, slow),
        *_pipeline(of_slow, layout, slow),
        *_data((of_slow, of_last), layout, (slow, last)),
        *_tied(of_last, layout, last),
    )
    return tuple(each for each in found if each.where.size > 1 and each.times > 0)


def _activation_bytes(job: Job, layout: Layout) -> float:
    return float(tokens_per_microbatch(job, layout) * job.model.hidden_size * job.compute_bytes)


def _is_full(stage: Stage) -> int:
    return int(stage.policy == 2)


def _operation(
    job: Job,
    line: LineName,
    kind: str,
    where: GroupShape,
    num_bytes: float,
    times: float,
    *,
    across: bool = False,
    experts: bool = False,
) -> Operation:
    """One operation inside the job's cluster; `across`: between it and other pools."""
    prices: dict[str, Any] = {
        "all-gather": all_gather_seconds,
        "reduce-scatter": reduce_scatter_seconds,
        "all-reduce": all_reduce_seconds,
        "all-to-all": all_to_all_seconds,
        "ring exchange": ring_exchange_seconds,
    }
    network = job.across if across and job.across else job.cluster
    if kind == "send":
        seconds = send_seconds(network, where.stride, num_bytes / job.engine.send_share)
    else:
        seconds = prices[kind](group(network, where.size, where.stride), num_bytes)
    pool = job.cluster.name if job.between is not None and not across else ""
    return Operation(
        line=line,
        kind=kind,
        where=replace(where, pool=pool),
        num_bytes=float(num_bytes),
        times=float(times),
        seconds=float(seconds),
        network=network,
        experts=experts,
    )


def _tensor(job: Job, layout: Layout, stage: Stage) -> Iterator[Operation]:
    """Pairs of an all-gather and a reduce-scatter with sequence parallelism, all-reduces without it."""
    where = GroupShape(size=layout.tp, stride=1)
    m = num_microbatches(job, layout)
    layers = sum(float(count) for _, count in layer_kinds(job, layout, stage))
    pairs = (1 if job.model.parallel_attention else 2) + float(cross_attention_share(job.model))
    ends = int(holds_embedding(stage)) + int(holds_head(layout, stage))
    times = m * (layers * pairs * (2 + _is_full(stage)) + ends)
    for kind in ("all-gather", "reduce-scatter") if layout.sp else ("all-reduce",):
        yield _operation(job, LineName.TP_COMM, kind, where, _activation_bytes(job, layout), times)


def _context(job: Job, layout: Layout, stage: Stage) -> Iterator[Operation]:
    where = GroupShape(size=layout.cp, stride=layout.tp)
    exchanged = [float(each) for each in context_bytes(job, layout)]
    passes = num_microbatches(job, layout) * sum(float(count) for _, count in layer_kinds(job, layout, stage))
    if job.engine.context_exchange == "all-to-all":
        for each in exchanged:
            yield _operation(job, LineName.CP_COMM, "all-to-all", where, each, passes * (2 + _is_full(stage)))
        return
    num_bytes = exchanged[0]
    if job.engine.context_exchange == "gather":
        num_bytes *= layout.cp
        yield _operation(job, LineName.CP_COMM, "all-gather", where, num_bytes, passes * (1 + _is_full(stage)))
        yield _operation(job, LineName.CP_COMM, "reduce-scatter", where, num_bytes, passes)
        return
    hops = passes * (layout.cp - 1)
    yield _operation(job, LineName.CP_COMM, "ring exchange", where, num_bytes, hops * (3 + _is_full(stage)))


def _experts(job: Job, layout: Layout, stage: Stage) -> Iterator[Operation]:
    moe = job.model.moe
    if moe is None:
        return
    where, shared = GroupShape(size=layout.ep, stride=layout.etp), GroupShape(size=layout.etp, stride=1)
    layers = sum(float(count) for experts, count in layer_kinds(job, layout, stage) if experts)
    times = num_microbatches(job, layout) * layers * (2 + _is_full(stage))
    num_bytes = _activation_bytes(job, layout) / layout.tp * moe.experts_per_token * moe.imbalance
    yield _operation(job, LineName.EP_COMM, "all-to-all", where, num_bytes, 2 * times)
    yield _operation(job, LineName.EP_COMM, "all-gather", shared, num_bytes * layout.etp, times)
    yield _operation(job, LineName.EP_COMM, "reduce-scatter", shared, num_bytes * layout.etp, times)


def _pipeline(job: Job, layout: Layout, stage: Stage) -> Iterator[Operation]:
    """An activation to the stage after, a gradient to the one before; each of them may be in another pool."""
    where = GroupShape(size=layout.pp, stride=layout.stride("pp"))
    times = num_microbatches(job, layout) * layout.interleave
    num_bytes = _activation_bytes(job, layout)
    scattered = layout.sp == 1 or job.engine.scatters_pipeline_sends
    sent, crossings = num_bytes / (layout.tp if scattered else 1), int(stage.num_crossings)
    yield _operation(job, LineName.PP_COMM, "send", where, sent, times * (2 - crossings))
    yield _operation(job, LineName.PP_COMM, "send", where, sent, times * crossings, across=True)
    if layout.pp > 1 and not layout.sp and job.engine.scatters_pipeline_sends:
        yield _operation(
            job, LineName.PP_COMM, "all-gather", GroupShape(size=layout.tp, stride=1), num_bytes, 2 * times
        )


def _data(jobs: tuple[Job, Job], layout: Layout, stages: tuple[Stage, Stage]) -> Iterator[Operation]:
    """Reductions of gradients and gathers of weights, of common parameters and of routed experts.

    jobs, stages: of the stage that sets the pace and of the one that ends last.
    """
    shards = int(shard_degree(layout))
    shard = GroupShape(size=shards, stride=layout.tp)
    replicas = GroupShape(size=layout.dp * layout.cp // shards, stride=layout.tp * shards)
    yield from _reduce_and_gather(jobs, layout, shard, replicas, stages, experts=False)
    if jobs[0].model.moe is not None:
        stride, shards = layout.ep * layout.etp, int(expert_shard_degree(layout))
        ranks = max(1, layout.dp * layout.cp * layout.tp // stride)
        shard = GroupShape(size=shards, stride=stride)
        replicas = GroupShape(size=ranks // shards, stride=stride * shards)
        yield from _reduce_and_gather(jobs, layout, shard, replicas, stages, experts=True)


def _reduce_and_gather(
    jobs: tuple[Job, Job],
    layout: Layout,
    shard: GroupShape,
    replicas: GroupShape,
    stages: tuple[Stage, Stage],
    *,
    experts: bool,
) -> Iterator[Operation]:
    """ZeRO-2 reduces after each microbatch, ZeRO-3 gathers for each pass too, on the stage that sets the pace.

    PipeDream updates after each microbatch.
    """
    m, line = num_microbatches(jobs[0], layout), LineName.DP_COMM
    slow, last = (
        float(held.experts if experts else held.common)
        for held in (trained_params(job, layout, stage) for job, stage in zip(jobs, stages, strict=True))
    )
    frozen = frozen_bytes(jobs[0], layout, stages[0])
    frozen_too = float(frozen.experts if experts else frozen.common) if layout.zero == 3 else 0.0
    updates, states = _updates(jobs[0], layout), jobs[0].state_bytes
    job, reduces, num_params = (jobs[0], m, slow) if layout.zero >= 2 else (jobs[1], updates, last)
    num_bytes = states.grads * num_params
    yield _operation(job, line, "reduce-scatter", shard, num_bytes, reduces, experts=experts)
    yield _operation(job, line, "all-reduce", replicas, num_bytes / shard.size, reduces, experts=experts)
    once = updates * int(layout.zero > 0)
    job, gathers, num_params = (jobs[0], 2 * m, slow) if layout.zero == 3 else (jobs[1], once, last)
    gathered = states.weights * num_params + frozen_too
    yield _operation(job, line, "all-gather", shard, gathered, gathers, experts=experts)


def _updates(job: Job, layout: Layout) -> float:
    return float(num_microbatches(job, layout)) if layout.schedule == "pipedream" else 1.0


def _tied(job: Job, layout: Layout, stage: Stage) -> Iterator[Operation]:
    last = int(head_stage(layout))
    if job.model.tied_embeddings and not job.training.lora_rank and last > 0 and stage.index in (0, last):
        where = GroupShape(size=2, stride=last * layout.stride("pp"))
        num_bytes = job.state_bytes.grads * embedding_params_on_device(job.model, job.engine, layout)
        times, apart = _updates(job, layout), bool(stage.ends_apart)
        yield _operation(job, LineName.TIED_EMBEDDING, "all-reduce", where, float(num_bytes), times, across=apart)
