"""Which collectives a layout causes, how many bytes they move, and what of them the step feels."""

from __future__ import annotations

from dataclasses import dataclass
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
from planner.cost.compute import memory_bound_seconds
from planner.cost.layers import tokens_per_microbatch
from planner.cost.parameters import cross_attention_share, embedding_params_on_device
from planner.cost.stage import expert_shard_degree, shard_degree
from planner.layout import head_stage
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.cost.collectives import Group
    from planner.cost.stage import Stage
    from planner.layout import Degrees, LayerDegrees
    from planner.specs.job import PoolJob

__all__ = [
    "BesideSeconds",
    "StageWindow",
    "context_bytes",
    "context_parallel_seconds",
    "data_parallel_seconds",
    "expert_parallel_seconds",
    "hidden_behind_weight_gradients",
    "hidden_context_parallel_seconds",
    "hidden_tensor_parallel_seconds",
    "pipeline_send_seconds",
    "tensor_parallel_end_seconds",
    "tensor_parallel_seconds",
    "tied_embedding_seconds",
]


def _activation_bytes(job: PoolJob, layout: LayerDegrees) -> Any:
    """Bytes of one whole (s b h) activation of one microbatch on one context-parallel rank."""
    return tokens_per_microbatch(job, layout) * job.model.hidden_size * job.compute_bytes


def tensor_parallel_seconds(job: PoolJob, layout: LayerDegrees) -> tuple[Any, Any]:
    """Forward and backward seconds of one layer's tensor-parallel collectives for one microbatch.

    Two all-reduces each way; with sequence parallelism two all-gathers and two reduce-scatters each way, which
    move the same bytes. Parallel attention needs half of them, cross-attention one more each way. All of it is exposed:
    the next product needs the result.

    Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.2; Chowdhery et
    al., PaLM (2022), section 2 for parallel attention.
    """
    pairs = (1.0 if job.model.parallel_attention else 2.0) + cross_attention_share(job.model)
    where = group(job.cluster, layout.tp, 1)
    num_bytes = _activation_bytes(job, layout)
    sequence = pairs * (all_gather_seconds(where, num_bytes) + reduce_scatter_seconds(where, num_bytes))
    seconds = np.where(np.equal(layout.sp, 1), sequence, pairs * all_reduce_seconds(where, num_bytes))
    return seconds, seconds


def hidden_tensor_parallel_seconds(job: PoolJob, layout: LayerDegrees, comm: Any, products: Any) -> Any:
    """Part of `comm` seconds of collectives that runs beside `products` seconds of matrix products.

    A product is cut into tp pieces; each piece computes while the next one travels, so one piece shows, and what
    is longer than the products.

    Source: Transformer Engine, user buffers (--tp-comm-overlap); Wang et al. (ASPLOS 2023), section 5.1.
    """
    if not job.engine.overlaps_tensor_parallel:
        return 0.0 * comm
    return np.minimum(comm * (1.0 - 1.0 / layout.tp), products)


def hidden_behind_weight_gradients(job: PoolJob, layout: LayerDegrees, comm: Any, weight_gradients: Any) -> Any:
    """Part of `comm` seconds of a layer's backward collectives that runs beside its weight gradients' products.

    The sum of a column-parallel map's input gradient starts before its weight gradient, and takes part in the wait
    only where it is longer. These maps have about half of the weights. Without sequence parallelism all backward
    collectives are such sums; with it the gathering at the row-parallel maps stays in sight.

    Source: Megatron-LM, megatron/core/tensor_parallel/layers.py; Korthikanti et al. (2022), section 4.2.2.
    """
    if not job.engine.overlaps_weight_gradients:
        return 0.0 * comm
    return np.minimum(comm * np.where(np.equal(layout.sp, 1), 0.5, 1.0), weight_gradients / 2.0)


def tensor_parallel_end_seconds(job: PoolJob, layout: LayerDegrees) -> Any:
    """Seconds of the collectives around the embedding or the head, for one microbatch, forward and backward.

    One all-reduce (or an all-gather and a reduce-scatter) at each end of the model.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: vocabulary-parallel embedding and cross entropy.
    """
    where = group(job.cluster, layout.tp, 1)
    num_bytes = _activation_bytes(job, layout)
    sequence = all_gather_seconds(where, num_bytes) + reduce_scatter_seconds(where, num_bytes)
    return np.where(np.equal(layout.sp, 1), sequence, all_reduce_seconds(where, num_bytes))


def pipeline_send_seconds(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """Seconds that a stage sends for one microbatch: an activation and a gradient for each of its chunks.

    With sequence parallelism each tensor-parallel rank sends its own part. Without it every rank sends all of
    it, or (scatter/gather) its share, which the receivers gather over the tensor-parallel group. A single pair of ranks
    need not reach the link's bandwidth. What goes to another pool takes the link between pools.

    Source: Narayanan et al. (SC 2021), sections 3.2 and 4.1; engine profile, send_share.
    """
    num_bytes = _activation_bytes(job, layout)
    scattered = np.equal(layout.sp, 1) | job.engine.scatters_pipeline_sends
    shares = np.where(scattered, layout.tp, 1)
    sent, distance = num_bytes / (shares * job.engine.send_share), layout.dp * layout.cp * layout.tp
    gathers = np.equal(layout.sp, 0) & job.engine.scatters_pipeline_sends
    gathered = np.where(gathers, all_gather_seconds(group(job.cluster, layout.tp, 1), num_bytes), 0.0)
    both = 2.0 * (send_seconds(job.cluster, distance, sent) + gathered)
    if job.across is not None:
        across = send_seconds(job.across, distance, sent) + gathered
        both = both + stage.num_crossings * (across - both / 2.0)
    return np.where(np.greater(layout.pp, 1), layout.interleave * both, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWindow:
    """Seconds of a stage's layers for one microbatch, forward and backward: what communication can hide behind."""

    forward: Any
    backward: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSeconds:
    """Transfers of one stage beside its work: data parallelism's reductions and gatherings, copies to the host.

    per_microbatch is felt m times a step, per_step once; busy counts all of it. What is exposed of the former is felt
    by the forward or by the backward pass.
    """

    busy_per_microbatch: Any
    exposed_forward: Any
    exposed_backward: Any
    busy_per_step: Any
    exposed_per_step: Any


def _replica_groups(job: PoolJob, layout: Degrees, *, experts: bool) -> tuple[Group, Group]:
    """The group that shards the states and the group of its replicas, of common parameters or of experts.

    Source: rank order of planner/layout.py: tp, then cp, then dp; a shard group is a run of dp * cp / hsdp.
    Experts are spread over runs of ep * etp ranks, whose replicas are that far apart.
    """
    if experts:
        stride = layout.ep * layout.etp
        ranks = np.maximum(1, layout.dp * layout.cp * layout.tp // stride)
        shards = expert_shard_degree(layout)
    else:
        stride, ranks, shards = layout.tp, layout.dp * layout.cp, shard_degree(layout)
    return group(job.cluster, shards, stride), group(job.cluster, ranks / shards, stride * shards)


def _hidden_behind(seconds: Any, num_units: Any, window: Any, overlaps: bool) -> Any:
    """Exposed part of `seconds` cut into `num_units` equal pieces, all but one behind work of `window` seconds.

    The piece of the last unit has nothing left to hide behind; the others hide as far as the window reaches.

    Source: derived here from bucketed overlap, Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3.
    """
    if not overlaps:
        return seconds
    last = seconds / np.maximum(num_units, 1)
    return last + np.maximum(0.0, (seconds - last) - window)


def _reduce_and_gather_seconds(
    job: PoolJob, layout: Degrees, num_params: Any, frozen_bytes: Any, *, experts: bool
) -> tuple[Any, Any]:
    """Seconds to bring the gradient of `num_params` parameters where the optimizer reads it, and weights back.

    From ZeRO-3 on the frozen weights come with them.

    ZeRO-0 all-reduces over all replicas; from ZeRO-1 on a reduce-scatter in the shard group, then an all-reduce
    of the shard over the replicas of the group (HSDP); weights are gathered in the shard group.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 7.
    """
    shard_group, replicas = _replica_groups(job, layout, experts=experts)
    num_bytes = job.state_bytes.grads * num_params
    scattered = reduce_scatter_seconds(shard_group, num_bytes)
    reduced = scattered + all_reduce_seconds(replicas, num_bytes / shard_group.size)
    gathered = job.state_bytes.weights * num_params + np.where(np.greater_equal(layout.zero, 3), frozen_bytes, 0.0)
    return reduced, all_gather_seconds(shard_group, gathered)


def data_parallel_seconds(job: PoolJob, layout: Degrees, stage: Stage, window: StageWindow) -> BesideSeconds:
    """Seconds of data-parallel communication of one stage, and what of it the step feels.

    ZeRO-0 and 1 reduce once a step, behind the last microbatch's backward pass; ZeRO-1 and 2 gather updated
    weights once, behind the first forward pass. ZeRO-2 reduces after every microbatch. ZeRO-3 gathers weights
    for every forward and backward pass too, one layer ahead, so only what is longer than a layer's work shows.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 7; overlap layer by layer as torch FSDP2 prefetches.
    """
    overlaps = job.engine.overlaps_data_parallel
    held, layers, zero = trained_params(job, layout, stage), stage.num_layers, np.asarray(layout.zero)
    frozen = frozen_bytes(job, layout, stage)
    reduced, gathered = _reduce_and_gather_seconds(job, layout, held.common, frozen.common, experts=False)
    if job.model.moe is not None:
        more_reduced, more_gathered = _reduce_and_gather_seconds(
            job, layout, held.experts, frozen.experts, experts=True
        )
        reduced, gathered = reduced + more_reduced, gathered + more_gathered
    share = np.maximum(layers - 1, 0) / np.maximum(layers, 1)
    work_back, work_front = share * window.backward, share * window.forward
    gathers_once = (zero == 1) | (zero == 2)
    once = np.where(zero <= 1, reduced, 0.0) + np.where(gathers_once, gathered, 0.0)
    once_exposed = np.where(zero <= 1, _hidden_behind(reduced, layers, work_back, overlaps), 0.0)
    once_exposed = once_exposed + np.where(gathers_once, _hidden_behind(gathered, layers, work_front, overlaps), 0.0)
    copied = (zero <= 1) & np.greater(layout.dp * layout.cp, 1) & (job.engine.reduction_bytes > 0)
    copies = np.where(copied, memory_bound_seconds(job, job.engine.reduction_bytes * held.total), 0.0)
    once, once_exposed = once + copies, once_exposed + copies
    backward_each = np.where(zero >= 2, reduced, 0.0) + np.where(zero == 3, gathered, 0.0)
    forward_each = np.where(zero == 3, gathered, 0.0)
    each = zero >= 2
    return BesideSeconds(
        busy_per_microbatch=backward_each + forward_each,
        exposed_forward=np.where(each, _hidden_behind(forward_each, layers, work_front, overlaps), 0.0),
        exposed_backward=np.where(each, _hidden_behind(backward_each, layers, work_back, overlaps), 0.0),
        busy_per_step=once,
        exposed_per_step=once_exposed,
    )


def expert_parallel_seconds(job: PoolJob, layout: LayerDegrees) -> Any:
    """Forward (and as much backward) seconds of one layer's expert all-to-alls for one microbatch.

    Each rank sends its tokens' choices to the ranks of their experts and takes the results back: two exchanges
    of (ep - 1) / ep of s b k h / (c t) elements. Ranks that share an expert (etp) gather and reduce them too.
    Where the engine sends a token to each host once, the k choices of a token share what they can, the more so where
    the router chooses among few groups of experts. 8-bit tokens have an fp32 scale for each 128 elements.

    Source: Lepikhin et al., GShard (2020), section 3.2; Megatron-LM, moe/token_dispatcher.py (alltoall); DeepSeek-V3
    (2024), sections 3.2.2 and 3.3.2, for groups and 8-bit dispatch.
    """
    moe = job.model.moe
    assert moe is not None, "only layers with experts exchange tokens"
    num_bytes = _activation_bytes(job, layout) / layout.tp * moe.experts_per_token * moe.imbalance
    copies = moe.experts_per_token if job.engine.dispatches_once_per_host else 1
    groups = (moe.num_groups, moe.groups_per_token) if moe.groups_per_token < moe.num_groups else None
    where = group(job.cluster, layout.ep, layout.etp)
    low = job.engine.fp8_dispatch and job.training.precision in ("fp8", "fp4")
    there = num_bytes * ((1.0 + 4.0 / 128) / 2 if low else 1.0)
    exchange = all_to_all_seconds(where, there, copies=copies, groups=groups)
    exchange = exchange + all_to_all_seconds(where, num_bytes, copies=copies, groups=groups)
    shared = group(job.cluster, layout.etp, 1)
    gathered = num_bytes * layout.etp
    return exchange + all_gather_seconds(shared, gathered) + reduce_scatter_seconds(shared, gathered)


def context_bytes(job: PoolJob, layout: LayerDegrees) -> tuple[Any, ...]:
    """Bytes of one rank that context parallelism exchanges in one layer and pass: keys with values, in one piece.

    An engine that trades sequence for heads sends queries, keys, values and outputs, each on its own; key-value heads
    are repeated where there are fewer than ranks.

    Source: definition; Jacobs et al., DeepSpeed Ulysses (2023), section 3.
    """
    model, t = job.model, layout.tp
    elements = tokens_per_microbatch(job, layout) * job.compute_bytes
    heads, kv_heads = model.num_heads / t, model.num_kv_heads / t
    key, value, shared = model.head_size, model.head_size, kv_heads
    if model.mla is not None:
        key, value, shared = model.mla.nope_head_size + model.mla.rope_head_size, model.mla.value_head_size, heads
    if job.engine.context_exchange != "all-to-all":
        return (elements * shared * (key + value),)
    shared = np.maximum(shared, layout.cp)
    return tuple(elements * width for width in (heads * key, shared * key, shared * value, heads * value))


def context_parallel_seconds(job: PoolJob, layout: LayerDegrees) -> tuple[Any, Any]:
    """Forward and backward seconds of one layer's context-parallel exchange for one microbatch.

    Ring attention passes keys and values c - 1 times to the neighbour, gradients too in the backward pass. Some engines
    gather keys and values before the core instead, and reduce their gradients after it. Ulysses trades the rank's part
    of the sequence for a part of the heads before the core, and back after it.

    Source: Liu et al., Ring Attention (2023), section 3; Megatron-LM, cp_comm_type p2p; Llama 3 (2024), section
    3.3.2, for the gathering; Jacobs et al., DeepSpeed Ulysses (2023), section 3, for the trade.
    """
    c, exchanged = layout.cp, context_bytes(job, layout)
    where = group(job.cluster, c, layout.tp)
    if job.engine.context_exchange == "all-to-all":
        traded = sum_of(all_to_all_seconds(where, each) for each in exchanged)
        return traded, traded
    (num_bytes,) = exchanged
    if job.engine.context_exchange == "gather":
        return all_gather_seconds(where, c * num_bytes), reduce_scatter_seconds(where, c * num_bytes)
    hops = np.maximum(c - 1, 0) * ring_exchange_seconds(where, num_bytes)
    return hops, 2.0 * hops


def hidden_context_parallel_seconds(job: PoolJob, layout: LayerDegrees, exchange: Any, core: Any) -> Any:
    """Seconds of one pass's exchange that run beside the attention core, a part of which computes during each hop.

    Engines that gather keys and values, or trade for heads, hide nothing.

    Source: Liu et al., Ring Attention (2023), section 3.
    """
    if job.engine.context_exchange != "ring":
        return np.zeros(np.shape(exchange))
    return np.minimum(exchange, np.maximum(layout.cp - 1, 0) * core / layout.cp)


def tied_embedding_seconds(job: PoolJob, layout: Degrees, stage: Stage) -> Any:
    """Seconds to add the two copies of a tied embedding's gradient, felt by the first and the last stage.

    Source: Megatron-LM, megatron/core/distributed/finalize_model_grads.py.
    """
    if not job.model.tied_embeddings or job.training.lora_rank:
        return np.zeros(np.broadcast_shapes(np.shape(layout.pp), np.shape(stage.index)))
    last = head_stage(layout)
    distance = last * layout.dp * layout.cp * layout.tp
    where = group(job.cluster, np.where(np.greater(last, 0), 2, 1), np.maximum(distance, 1))
    num_bytes = job.state_bytes.grads * embedding_params_on_device(job.model, job.engine, layout)
    seconds = all_reduce_seconds(where, num_bytes)
    if job.across is not None:
        across = group(job.across, where.size, np.maximum(distance, 1))
        seconds = np.where(stage.ends_apart, all_reduce_seconds(across, num_bytes), seconds)
    is_end = np.equal(stage.index, 0) | np.equal(stage.index, last)
    return np.where(is_end, seconds, 0.0)
