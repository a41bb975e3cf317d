"""A pipeline stage as the cost model sees it: how many layers of each kind, and what parameters they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from planner.cost.parameters import end_params_on_device, expert_layer_params, layer_params_on_device
from planner.layout import head_stage, stage_of_chunk
from planner.specs.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from planner.layout import Degrees, LayerDegrees, Layout
    from planner.specs.job import AnyJob
    from planner.specs.model import ModelSpec

T = TypeVar("T")

__all__ = [
    "POLICIES",
    "HeldParams",
    "Stage",
    "by_policy",
    "by_pool",
    "chunks_of",
    "expert_shard_degree",
    "held_params",
    "holds_embedding",
    "holds_head",
    "layer_kinds",
    "layer_params",
    "pool_indices",
    "shard_degree",
    "stage_of",
    "stages_of",
    "with_borders",
]

POLICIES: Final = ("none", "selective", "full")
"""Recompute policies; arrays of stages carry a policy as its index here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage, or an array of them; or one of the chunks of a stage.

    index: position in the pipeline. num_layers: layers that it holds. num_expert_layers: how many of them have
    experts. policy: recompute policy as an index into `POLICIES`. chunk: of a chunk, its position in model order.
    largest_chunk: layers of the largest chunk of an interleaved stage; None: its chunks are equal.
    num_crossings: of the two neighbours that it sends to, how many are in another pool. ends_apart: whether the model
    begins in one pool and ends in another.
    """

    index: Any
    num_layers: Any
    policy: Any
    num_expert_layers: Any = 0
    chunk: Any = None
    largest_chunk: Any = None
    num_crossings: Any = 0
    ends_apart: Any = False


def holds_embedding(stage: Stage) -> Any:
    """Whether the model begins here: the first stage, or the first chunk.

    Source: definition of a pipeline.
    """
    return np.equal(stage.index if stage.chunk is None else stage.chunk, 0)


def holds_head(layout: Degrees, stage: Stage) -> Any:
    """Whether the model ends here: the last stage (of a V the first one), or the last chunk.

    Source: `planner.layout.head_stage`.
    """
    if stage.chunk is None:
        return np.equal(stage.index, head_stage(layout))
    return np.equal(stage.chunk, layout.pp * layout.interleave - 1)


def by_policy(policy: Any, values: tuple[Any, Any, Any]) -> Any:
    """The value of each stage's policy.

    Source: definition of `POLICIES`.
    """
    none, selective, full = values
    return np.where(np.equal(policy, 0), none, np.where(np.equal(policy, 1), selective, full))


def stage_of(job: AnyJob, *, index: Any, num_layers: Any, policy: Any, layout: Degrees | None = None) -> Stage:
    """A stage of the search: leading dense layers all lie on the first stage.

    Where only every n-th layer has experts, a stage has its share of them. layout: what it is a stage of, so that
    interleaved chunks may differ by a layer; None: its chunks are equal.
    """
    differ = layout is not None and layout.schedule == "interleaved"
    moe, largest = job.model.moe, -(-num_layers // layout.interleave) if layout is not None and differ else None
    if moe is None:
        return Stage(index=index, num_layers=num_layers, policy=policy, largest_chunk=largest)
    dense = np.where(np.equal(index, 0), np.minimum(moe.num_dense_layers, num_layers), 0)
    return Stage(
        index=index,
        num_layers=num_layers,
        policy=policy,
        num_expert_layers=(num_layers - dense) / moe.layer_frequency,
        largest_chunk=largest,
    )


def with_borders(stage: Stage, layout: Degrees, pool_of: Callable[[Any], Any]) -> Stage:
    """The stages with what crosses the borders of pools; `pool_of` says the pool of each, given their indices.

    Interleaved stages also send from the end of the pipeline to its beginning.
    """
    last, wraps = layout.pp - 1, layout.schedule == "interleaved"
    before = np.where(np.greater(stage.index, 0), stage.index - 1, last if wraps else 0)
    after = np.where(np.less(stage.index, last), stage.index + 1, 0 if wraps else last)
    own = pool_of(stage.index)
    crossings = np.not_equal(pool_of(before), own).astype(int) + np.not_equal(pool_of(after), own)
    apart = np.not_equal(pool_of(0 * stage.index), pool_of(head_stage(layout) + 0 * stage.index))
    return replace(stage, num_crossings=crossings, ends_apart=apart)


def pool_indices(job: AnyJob, layout: Layout) -> NDArray[np.int64]:
    """The pool of each stage of a layout, as its position among those of the job; shape (pp,).

    Source: definition of the layout.
    """
    if isinstance(job, Job):
        return np.zeros(layout.pp, dtype=np.int64)
    names = [pool.cluster.name for pool in job.pools]
    return np.array([names.index(name) for name in layout.pools])


def by_pool(job: AnyJob, pool: Any, price: Callable[[Job], T]) -> T:
    """What `price` says of an array of stages, of each by the job on its own pool.

    pool: of each stage. A price may be arrays in dataclasses, mappings and tuples; texts are those of the first pool.
    """
    if isinstance(job, Job):
        return price(job)
    chosen: T = _chosen(pool, [price(each) for each in job.pools])
    return chosen


def _chosen(pool: Any, of_pools: Sequence[Any]) -> Any:
    first = of_pools[0]
    if isinstance(first, str):
        return first
    if isinstance(first, tuple):
        return tuple(_chosen(pool, parts) for parts in zip(*of_pools, strict=True))
    if isinstance(first, Mapping):
        return {key: _chosen(pool, [each[key] for each in of_pools]) for key in first}
    if is_dataclass(first) and not isinstance(first, type):
        parts = {f.name: _chosen(pool, [getattr(each, f.name) for each in of_pools]) for f in fields(first)}
        return replace(first, **parts)
    return np.choose(pool, [np.broadcast_to(each, np.shape(pool)) for each in of_pools])


def stages_of(job: AnyJob, layout: Layout) -> Stage:
    """All stages of a layout as arrays of shape (pp,)."""
    chunks, stages = chunks_of(job, layout), np.arange(layout.pp)
    found = Stage(
        index=stages,
        num_layers=np.array([layout.layers_of_stage(r) for r in range(layout.pp)]),
        policy=np.array([POLICIES.index(layout.recompute_of_stage(r)) for r in range(layout.pp)]),
        num_expert_layers=np.bincount(chunks.index, weights=chunks.num_expert_layers),
        largest_chunk=_largest_chunks(layout),
    )
    return with_borders(found, layout, pool_indices(job, layout).__getitem__) if layout.pools else found


def _largest_chunks(layout: Layout) -> Any:
    if layout.schedule != "interleaved":
        return None
    return np.max(np.reshape(layout.layers_per_stage, (layout.interleave, layout.pp)), axis=0)


def chunks_of(job: AnyJob, layout: Layout) -> Stage:
    """All chunks of a layout in model order, as arrays of shape (pp * interleave,)."""
    layers = np.array(layout.layers_per_stage)
    starts = np.concatenate([[0], np.cumsum(layers)])
    moe = job.model.moe
    first_expert = job.model.num_layers if moe is None else moe.num_dense_layers
    every = 1 if moe is None else moe.layer_frequency
    held = np.maximum(starts[1:], first_expert) - np.maximum(starts[:-1], first_expert)
    chunk = np.arange(layout.num_chunks)
    return Stage(
        index=stage_of_chunk(layout.schedule, layout.pp, chunk),
        num_layers=layers,
        policy=np.array([POLICIES.index(policy) for policy in layout.recompute]),
        num_expert_layers=held / every,
        chunk=chunk,
    )


def layer_kinds(job: AnyJob, layout: Degrees, stage: Stage) -> tuple[tuple[bool, Any], ...]:
    """Kinds of layers on a stage, as (has experts, how many); kinds that the model lacks are left out.

    Layers for multi-token prediction are of the model's main kind and lie on the last stage.

    Source: DeepSeek-V3 (2024), section 2.2; definition of the model document.
    """
    moe = job.model.moe
    extra = holds_head(layout, stage) * job.model.mtp_layers if job.model.mtp_layers else 0
    if moe is None:
        return ((False, stage.num_layers + extra),)
    experts = (True, stage.num_expert_layers + extra)
    if moe.num_dense_layers or moe.layer_frequency > 1:
        return (experts, (False, stage.num_layers - stage.num_expert_layers))
    return (experts,)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParams:
    """Parameters on one device of a stage, before ZeRO: common ones, and routed experts.

    The two differ in who holds copies: common parameters have dp * cp replicas, experts dp * cp * tp / (ep * etp).
    """

    common: Any
    experts: Any

    @property
    def total(self) -> Any:
        """All of them."""
        return self.common + self.experts


def _dense(model: ModelSpec) -> ModelSpec:
    """The model with an ordinary feed-forward block in every layer."""
    return model if model.moe is None else model.model_copy(update={"moe": None})


def layer_params(job: Job, layout: LayerDegrees, *, experts: bool) -> HeldParams:
    """Parameters of one layer on one device.

    Source: parameters.py.
    """
    if not experts:
        return HeldParams(common=layer_params_on_device(_dense(job.model), layout), experts=0.0)
    routed = expert_layer_params(job.model) / (layout.ep * layout.etp)
    return HeldParams(common=layer_params_on_device(job.model, layout) - routed, experts=routed)


def held_params(job: Job, layout: Degrees, stage: Stage) -> HeldParams:
    """Parameters that one device of a stage holds: layers of each kind, embeddings and head.

    Source: sum of the layers and the ends, parameters.py.
    """
    common = end_params_on_device(job.model, job.engine, layout, stage.index) + 0.0
    routed: Any = 0.0
    for experts, count in layer_kinds(job, layout, stage):
        one = layer_params(job, layout, experts=experts)
        common, routed = common + count * one.common, routed + count * one.experts
    return HeldParams(common=common, experts=routed)


def shard_degree(layout: Degrees) -> Any:
    """Ranks over which ZeRO spreads a device's states: dp * cp / hsdp, and 1 without ZeRO.

    Source: Rajbhandari et al., ZeRO (SC 2020); HSDP shards within a replica.
    """
    return np.where(np.equal(layout.zero, 0), 1, layout.dp * layout.cp / layout.hsdp)


def expert_shard_degree(layout: Degrees) -> Any:
    """Ranks over which ZeRO spreads the states of routed experts: dp * cp * tp / (ep * etp), 1 without ZeRO.

    Source: Megatron-LM, expert data parallelism.
    """
    ranks = layout.dp * layout.cp * layout.tp / (layout.ep * layout.etp)
    return np.where(np.equal(layout.zero, 0), 1, np.maximum(1, ranks / layout.hsdp))
