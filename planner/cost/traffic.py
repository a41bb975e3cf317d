"""Which collectives a layout causes, how many bytes they move, and what of them the step feels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    group,
    reduce_scatter_seconds,
    send_seconds,
)
from planner.cost.parameters import embedding_params_on_device, end_params_on_device, layer_params_on_device

if TYPE_CHECKING:
    from planner.cost.collectives import Group
    from planner.cost.memory import Stage
    from planner.layout import Degrees
    from planner.specs.job import Job

__all__ = [
    "DataParallelSeconds",
    "LayerWindow",
    "data_parallel_seconds",
    "pipeline_send_seconds",
    "tensor_parallel_end_seconds",
    "tensor_parallel_seconds",
    "tied_embedding_seconds",
]


def _activation_bytes(job: Job, layout: Degrees) -> Any:
    """Bytes of one whole (s b h) activation of one microbatch on one context-parallel rank."""
    tokens = job.training.sequence_length * layout.mbs / layout.cp
    return tokens * job.model.hidden_size * job.compute_bytes


def tensor_parallel_seconds(job: Job, layout: Degrees) -> tuple[Any, Any]:
    """Forward and backward seconds of one layer's tensor-parallel collectives for one microbatch.

    Two all-reduces each way; with sequence parallelism two all-gathers and two reduce-scatters each way, which
    move the same bytes. All of it is exposed: the next product needs the result.

    Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.2.
    """
    where = group(job.cluster, layout.tp, 1)
    num_bytes = _activation_bytes(job, layout)
    sequence = 2.0 * (all_gather_seconds(where, num_bytes) + reduce_scatter_seconds(where, num_bytes))
    seconds = np.where(np.equal(layout.sp, 1), sequence, 2.0 * all_reduce_seconds(where, num_bytes))
    return seconds, seconds


def tensor_parallel_end_seconds(job: Job, layout: Degrees) -> Any:
    """Seconds of the collectives around the embedding or the head, for one microbatch, forward and backward.

    One all-reduce (or an all-gather and a reduce-scatter) at each end of the model.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: vocabulary-parallel embedding and cross entropy.
    """
    where = group(job.cluster, layout.tp, 1)
    num_bytes = _activation_bytes(job, layout)
    sequence = all_gather_seconds(where, num_bytes) + reduce_scatter_seconds(where, num_bytes)
    return np.where(np.equal(layout.sp, 1), sequence, all_reduce_seconds(where, num_bytes))


def pipeline_send_seconds(job: Job, layout: Degrees) -> Any:
    """Seconds that a stage sends for one microbatch: an activation and a gradient for each of its chunks.

    With sequence parallelism each tensor-parallel rank sends its own part. Without it every rank sends all of
    it, or (scatter/gather) its share, which the receivers gather over the tensor-parallel group.

    Source: Narayanan et al. (SC 2021), sections 3.2 and 4.1.
    """
    num_bytes = _activation_bytes(job, layout)
    scattered = np.equal(layout.sp, 1) | job.engine.scatters_pipeline_sends
    shares = np.where(scattered, layout.tp, 1)
    one = send_seconds(job.cluster, layout.dp * layout.cp * layout.tp, num_bytes / shares)
    gathers = np.equal(layout.sp, 0) & job.engine.scatters_pipeline_sends
    one = one + np.where(gathers, all_gather_seconds(group(job.cluster, layout.tp, 1), num_bytes), 0.0)
    return np.where(np.greater(layout.pp, 1), 2.0 * layout.interleave * one, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWindow:
    """Seconds of one layer's forward and backward pass for one microbatch: what communication can hide behind."""

    forward: Any
    backward: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSeconds:
    """Gradient reduction and parameter gathering of one stage.

    per_microbatch is felt m times a step, per_step once; busy counts all of it.
    """

    busy_per_microbatch: Any
    exposed_per_microbatch: Any
    busy_per_step: Any
    exposed_per_step: Any


def _replica_groups(job: Job, layout: Degrees) -> tuple[Group, Group]:
    """The group that shards the states and the group of its replicas.

    Source: rank order of planner/layout.py: tp, then cp, then dp; a shard group is a run of dp * cp / hsdp.
    """
    ranks = layout.dp * layout.cp
    shards = np.where(np.equal(layout.zero, 0), 1, ranks / layout.hsdp)
    return group(job.cluster, shards, layout.tp), group(job.cluster, ranks / shards, layout.tp * shards)


def _hidden_behind(seconds: Any, num_units: Any, window: Any, overlaps: bool) -> Any:
    """Exposed part of `seconds` cut into `num_units` equal pieces, all but one behind work of `window` seconds.

    The piece of the last unit has nothing left to hide behind; the others hide as far as the window reaches.

    Source: derived here from bucketed overlap, Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3.
    """
    if not overlaps:
        return seconds
    last = seconds / np.maximum(num_units, 1)
    return last + np.maximum(0.0, (seconds - last) - window)


def _reduce_seconds(job: Job, layout: Degrees, num_params: Any) -> Any:
    """Seconds to bring one gradient of `num_params` parameters where the optimizer reads it.

    ZeRO-0 all-reduces over all replicas; from ZeRO-1 on a reduce-scatter in the shard group, then an all-reduce
    of the shard over the replicas of the group (HSDP).

    Source: Rajbhandari et al., ZeRO (SC 2020), section 7.
    """
    shard_group, replicas = _replica_groups(job, layout)
    num_bytes = job.state_bytes.grads * num_params
    scattered = reduce_scatter_seconds(shard_group, num_bytes)
    return scattered + all_reduce_seconds(replicas, num_bytes / shard_group.size)


def data_parallel_seconds(job: Job, layout: Degrees, stage: Stage, window: LayerWindow) -> DataParallelSeconds:
    """Seconds of data-parallel communication of one stage, and what of it the step feels.

    ZeRO-0 and 1 reduce once a step, behind the last microbatch's backward pass; ZeRO-1 and 2 gather updated
    weights once, behind the first forward pass. ZeRO-2 reduces after every microbatch. ZeRO-3 gathers weights
    for every forward and backward pass too, one layer ahead, so only what is longer than a layer's work shows.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 7; overlap layer by layer as torch FSDP2 prefetches.
    """
    overlaps = job.engine.overlaps_data_parallel
    shard_group, _ = _replica_groups(job, layout)
    layer = layer_params_on_device(job.model, layout)
    ends = end_params_on_device(job.model, job.engine, layout, stage.index)
    layers = stage.num_layers
    zero = np.asarray(layout.zero)
    whole = _reduce_seconds(job, layout, layers * layer + ends)
    weight_bytes = np.maximum(job.state_bytes.weights, 1e-30)
    gather = all_gather_seconds(shard_group, weight_bytes * (layers * layer + ends))
    work_back, work_front = np.maximum(layers - 1, 0) * window.backward, np.maximum(layers - 1, 0) * window.forward
    once = np.where(zero <= 1, whole, 0.0)
    once_exposed = np.where(zero <= 1, _hidden_behind(whole, layers, work_back, overlaps), 0.0)
    gathers_once = (zero == 1) | (zero == 2)
    once = once + np.where(gathers_once, gather, 0.0)
    once_exposed = once_exposed + np.where(gathers_once, _hidden_behind(gather, layers, work_front, overlaps), 0.0)
    backward_each = np.where(zero >= 2, whole, 0.0) + np.where(zero == 3, gather, 0.0)
    forward_each = np.where(zero == 3, gather, 0.0)
    exposed_each = np.where(
        zero >= 2,
        _hidden_behind(backward_each, layers, work_back, overlaps)
        + _hidden_behind(forward_each, layers, work_front, overlaps),
        0.0,
    )
    return DataParallelSeconds(
        busy_per_microbatch=backward_each + forward_each,
        exposed_per_microbatch=exposed_each,
        busy_per_step=once,
        exposed_per_step=once_exposed,
    )


def tied_embedding_seconds(job: Job, layout: Degrees, stage: Stage) -> Any:
    """Seconds to add the two copies of a tied embedding's gradient, felt by the first and the last stage.

    Source: Megatron-LM, megatron/core/distributed/finalize_model_grads.py.
    """
    if not job.model.tied_embeddings:
        return np.zeros(np.broadcast_shapes(np.shape(layout.pp), np.shape(stage.index)))
    distance = (layout.pp - 1) * layout.dp * layout.cp * layout.tp
    where = group(job.cluster, np.where(np.greater(layout.pp, 1), 2, 1), np.maximum(distance, 1))
    num_bytes = job.state_bytes.grads * embedding_params_on_device(job.model, job.engine, layout)
    is_end = np.equal(stage.index, 0) | np.equal(stage.index, layout.pp - 1)
    return np.where(is_end, all_reduce_seconds(where, num_bytes), 0.0)
