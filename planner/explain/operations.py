"""The collectives and sends of one step, one by one: what the lines of the time ledger are sums of."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    shard_degree,
    stages_of,
)
from planner.cost.traffic import context_bytes
from planner.layout import head_stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.cost.ledger import TimeLine
    from planner.layout import Layout
    from planner.specs.job import Job

__all__ = ["GroupShape", "Operation", "operations_of_step", "stage_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A kind of group: `size` ranks, each `stride` from the next."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kind of collective or send.

    line: the ledger line that it belongs to. num_bytes: what one rank holds of it, as in cost/collectives.py.
    times: how often the stage of the ledger line runs it in a step. seconds: of one. experts: it works on the
    parameters of routed experts.
    """

    line: LineName
    kind: str
    where: GroupShape
    num_bytes: float
    times: float
    seconds: float
    experts: bool = False


def stage_at(stages: Stage, index: int) -> Stage:
    """One stage of an array of them."""
    whole = np.shape(stages.index)
    values = {f.name: getattr(stages, f.name) for f in fields(Stage)}
    return Stage(**{k: None if v is None else np.broadcast_to(v, whole)[index] for k, v in values.items()})


def operations_of_step(job: Job, layout: Layout, time: tuple[TimeLine, ...]) -> tuple[Operation, ...]:
    """Every kind of collective and send of the stages that the lines of `time` are about.

    For each line the sum of times * seconds is its busy time.
    """
    stages = stages_of(job, layout)
    slow = stage_at(stages, next(line.stage for line in time if line.name == LineName.COMPUTE))
    last = stage_at(stages, next(line.stage for line in time if line.name == LineName.DP_COMM))
    found = (
        *_tensor(job, layout, slow),
        *_context(job, layout, slow),
        *_experts(job, layout, slow),
        *_pipeline(job, layout),
        *_data(job, layout, slow, last),
        *_tied(job, layout, last),
    )
    return tuple(each for each in found if each.where.size > 1 and each.times > 0)


def _activation_bytes(job: Job, layout: Layout) -> float:
    return float(tokens_per_microbatch(job, layout) * job.model.hidden_size * job.compute_bytes)


def _is_full(stage: Stage) -> int:
    return int(stage.policy == 2)


def _operation(
    job: Job, line: LineName, kind: str, where: GroupShape, num_bytes: float, times: float, *, experts: bool = False
) -> Operation:
    prices: dict[str, Any] = {
        "all-gather": all_gather_seconds,
        "reduce-scatter": reduce_scatter_seconds,
        "all-reduce": all_reduce_seconds,
        "all-to-all": all_to_all_seconds,
        "ring exchange": ring_exchange_seconds,
    }
    if kind == "send":
        seconds = send_seconds(job.cluster, where.stride, num_bytes)
    else:
        seconds = prices[kind](group(job.cluster, where.size, where.stride), num_bytes)
    return Operation(
        line=line,
        kind=kind,
        where=where,
        num_bytes=float(num_bytes),
        times=float(times),
        seconds=float(seconds),
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


def _pipeline(job: Job, layout: Layout) -> Iterator[Operation]:
    where = GroupShape(size=layout.pp, stride=layout.stride("pp"))
    times = num_microbatches(job, layout) * 2 * layout.interleave
    num_bytes = _activation_bytes(job, layout)
    scattered = layout.sp == 1 or job.engine.scatters_pipeline_sends
    yield _operation(job, LineName.PP_COMM, "send", where, num_bytes / (layout.tp if scattered else 1), times)
    if layout.pp > 1 and not layout.sp and job.engine.scatters_pipeline_sends:
        yield _operation(job, LineName.PP_COMM, "all-gather", GroupShape(size=layout.tp, stride=1), num_bytes, times)


def _data(job: Job, layout: Layout, slow: Stage, last: Stage) -> Iterator[Operation]:
    """Reductions of gradients and gathers of weights, of common parameters and of routed experts."""
    shards = int(shard_degree(layout))
    shard = GroupShape(size=shards, stride=layout.tp)
    replicas = GroupShape(size=layout.dp * layout.cp // shards, stride=layout.tp * shards)
    yield from _reduce_and_gather(job, layout, shard, replicas, (slow, last), experts=False)
    if job.model.moe is not None:
        stride, shards = layout.ep * layout.etp, int(expert_shard_degree(layout))
        ranks = max(1, layout.dp * layout.cp * layout.tp // stride)
        shard = GroupShape(size=shards, stride=stride)
        replicas = GroupShape(size=ranks // shards, stride=stride * shards)
        yield from _reduce_and_gather(job, layout, shard, replicas, (slow, last), experts=True)


def _reduce_and_gather(
    job: Job, layout: Layout, shard: GroupShape, replicas: GroupShape, stages: tuple[Stage, Stage], *, experts: bool
) -> Iterator[Operation]:
    """ZeRO-2 reduces after each microbatch, ZeRO-3 gathers for each pass too, on the stage that sets the pace.

    PipeDream updates after each microbatch.
    """
    m, line = num_microbatches(job, layout), LineName.DP_COMM
    slow, last = (
        float(held.experts if experts else held.common)
        for held in (trained_params(job, layout, stage) for stage in stages)
    )
    frozen = frozen_bytes(job, layout, stages[0])
    frozen_too = float(frozen.experts if experts else frozen.common) if layout.zero == 3 else 0.0
    updates = _updates(job, layout)
    reduces, num_params = (m, slow) if layout.zero >= 2 else (updates, last)
    num_bytes = job.state_bytes.grads * num_params
    yield _operation(job, line, "reduce-scatter", shard, num_bytes, reduces, experts=experts)
    yield _operation(job, line, "all-reduce", replicas, num_bytes / shard.size, reduces, experts=experts)
    gathers, num_params = (2 * m, slow) if layout.zero == 3 else (updates * int(layout.zero > 0), last)
    gathered = job.state_bytes.weights * num_params + frozen_too
    yield _operation(job, line, "all-gather", shard, gathered, gathers, experts=experts)


def _updates(job: Job, layout: Layout) -> float:
    return float(num_microbatches(job, layout)) if layout.schedule == "pipedream" else 1.0


def _tied(job: Job, layout: Layout, stage: Stage) -> Iterator[Operation]:
    last = int(head_stage(layout))
    if job.model.tied_embeddings and not job.training.lora_rank and last > 0 and stage.index in (0, last):
        where = GroupShape(size=2, stride=last * layout.stride("pp"))
        num_bytes = job.state_bytes.grads * embedding_params_on_device(job.model, job.engine, layout)
        yield _operation(job, LineName.TIED_EMBEDDING, "all-reduce", where, float(num_bytes), _updates(job, layout))
