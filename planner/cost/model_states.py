"""Bytes of weights, gradients and optimizer state, on the device and on its host."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.activations import activation_terms, kept_activation_bytes
from planner.cost.adapters import constant_bytes_per_param, frozen_bytes, largest_layer, trained_params
from planner.cost.loss import num_logits
from planner.cost.microbatch import num_microbatches
from planner.cost.operators import layer_of
from planner.cost.optimizers import extra_moment_bytes, moment_bytes_per_param, sums_last
from planner.cost.parameters import HeldParams, head_params_on_device, matrices_in_order
from planner.cost.schedule import is_one_round
from planner.cost.shapes import alone, distinct_rows
from planner.cost.stage import (
    by_policy,
    end_params,
    expert_shard_divisor,
    held_params,
    holds_embedding,
    holds_head,
    layer_kinds,
    shard_degree,
    shard_of,
)
from planner.layout import offloads_optimizer, offloads_params
from planner.once import once
from planner.specs.recompute import FULL
from planner.sums import sum_of

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.numbers import Flag, Number
    from planner.specs.job import PoolJob


@once
def whole_gradients(job: PoolJob, layout: Degrees) -> Flag:
    """Whether a device accumulates gradients of all its parameters.

    Gradients are whole below ZeRO-2. In some engines gradients are also whole in pipelines, or with several
    microbatches, because the engine reduces once per step. FSDP has no permanent buffer for whole gradients: with one
    microbatch and no pipeline, each gradient is reduced immediately.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5; engine profile for differences between engines.
    """
    where = job.engine.memory.whole_gradients
    adds_up = np.greater(layout.pp, 1) | np.greater(job.training.global_batch_size, layout.dp * layout.mbs)
    if where == "accumulated":
        return adds_up
    if where == "lasting":
        return np.less(layout.zero, 2)
    return (np.less(layout.zero, 2) & adds_up) | np.greater(layout.pp, 1)


def state_bytes_per_param(job: PoolJob, layout: Degrees, *, experts: bool = False) -> tuple[Number, Number, Number]:
    """Bytes per parameter (of a matrix) of weights, gradients and optimizer state on one device.

    ZeRO-1 shards the optimizer state, ZeRO-2 also the gradients (except as in `whole_gradients`), ZeRO-3 also the
    weights. Offloaded states are excluded; `host_state_bytes_per_param` counts them. In fp32, an engine may keep no
    master weights if a rank is alone (`EngineMemory.shards_alone`).

    Source: Rajbhandari et al., ZeRO (SC 2020), figure 1; engine profile for differences between engines.
    """
    states, offloads = job.state_bytes, offloads_optimizer(layout)
    x = expert_shard_divisor(job, layout) if experts else shard_degree(layout)
    at_home = 0.0 if gathers_from_host(job, layout) else states.sharded_weights / x
    keeps_none = job.training.precision == "fp32" and not (job.engine.memory.shards_alone or job.model.moe)
    alone = np.equal(layout.dp * layout.cp, 1) & keeps_none
    weights = np.where(np.greater_equal(layout.zero, 3) & ~alone, at_home, states.weights)
    kept = states.grads + states.grad_copy + sums_last(job, layout) * job.engine.memory.pipeline_sums
    reduced = 0.0 if offloads and job.engine.offload.optimizer_takes != "states" else kept / x
    grads = np.where(whole_gradients(job, layout), kept, reduced)
    if offloads:
        return weights, grads, 0.0 * x
    master = np.where(alone, 0.0, states.master + states.zero_master * np.greater(layout.zero, 0))
    return weights, grads, (master + moment_bytes_per_param(job)) / x


def gathers_from_host(job: PoolJob, layout: Degrees) -> bool:
    """Whether the host's memory holds the shards of weights that ZeRO-3 gathers.

    Source: engine profile; DeepSpeed, runtime/zero/offload_config.py (offload_param).
    """
    takes = offloads_optimizer(layout) and job.engine.offload.optimizer_takes == "weights"
    return takes or offloads_params(layout)


def host_state_bytes_per_param(job: PoolJob) -> float:
    """Bytes on the host for each parameter of a device's shard, if the host updates the shard.

    fp32 gradients, weights and moments: 16 bytes for AdamW in mixed precision.

    Source: Ren et al., ZeRO-Offload (USENIX ATC 2021), section 3; DeepSpeed, runtime/zero/stage_1_and_2.py
    (estimate_zero2_model_states_mem_needs); Megatron-LM, optimizer/cpu_offloading/hybrid_optimizer.py.
    """
    states = job.state_bytes
    return 4.0 + (states.master or states.weights) + moment_bytes_per_param(job)


@once
def cut_gradient_params(job: PoolJob, layout: Degrees) -> Number:
    """Parameters whose gradients the fullest rank of ZeRO-2 keeps although they belong to other ranks' shards.

    Shards are views of whole gradients: a matrix that the border of two shards cuts stays whole on both ranks, and a
    matrix that is larger than a shard on all ranks that have a part of it. Vectors and adapters are too small to count.

    Source: DeepSpeed, runtime/zero/stage_1_and_2.py (get_flat_partition); derived here, tests/executed counts it.
    """
    wanted = np.equal(layout.zero, 2) & np.equal(layout.pp, 1) & (not offloads_optimizer(layout))
    if not job.engine.memory.bucket_buffers or job.training.lora_rank or not np.any(wanted):
        return 0.0
    shape = np.broadcast_shapes(*map(np.shape, (wanted, layout.tp, layout.dp, layout.cp)))
    keys = (layout.tp * wanted, shard_degree(layout) * wanted)
    columns = [np.broadcast_to(each, shape).ravel().astype(np.int64) for each in keys]
    first, position = distinct_rows(columns)
    found = np.zeros(len(first))
    for number, row in enumerate(first):
        tp, ranks = (int(each[row]) for each in columns)
        if ranks > 1:
            ends = np.cumsum(matrices_in_order(job.model, job.engine, alone(layout, tp)))
            borders = ends[-1] / ranks * np.arange(ranks + 1)
            begun = np.searchsorted(ends, borders[:-1] + 0.5, side="right")
            done = np.searchsorted(ends, borders[1:] - 0.5, side="left")
            found[number] = np.max(ends[done] - np.append(0.0, ends)[begun]) - ends[-1] / ranks
    return found[position].reshape(shape)


def reduced_early(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Share of the whole gradients of a stage's layers that is already reduced while its last chunk is left.

    Interleaved stages whose microbatches are one round finish a chunk's backward passes before they begin the chunk
    before it, and FSDP2 reduces a chunk's gradients after its last microbatch. The chunk that is left is the largest:
    it has at most (k + v - 1) / v of k layers. By then a head of at least one layer's size is reduced in its place.

    Source: torch, distributed/pipelining/stage.py (backward_maybe_with_nosync, last_backward); counted in the trainer's
    own step, tests/cost/test_memory.py.
    """
    if layout.schedule != "interleaved" or job.engine.memory.whole_gradients != "piped":
        return 0.0
    ends, layer = end_params(job, layout, stage), largest_layer(job, layout, stage)
    rest = np.where(holds_head(layout, stage) & (ends >= layer), 0.0, layout.interleave - 1.0)
    whole = (1.0 + rest / np.maximum(stage.num_layers, 1)) / layout.interleave
    return np.where(is_one_round(layout.pp, num_microbatches(job, layout)), 1.0 - whole, 0.0)


def ends_beside_whole_gradients(job: PoolJob, layout: Degrees, stage: Stage, stored: Number) -> tuple[Number, Number]:
    """Bytes beside each layer's backward pass, and transient bytes when the gradients of the ends are complete.

    A unit's gradient in the compute precision is added to its fp32 sum when the unit's backward pass ends. That of the
    head ends with the chunk's, so the head's gradient is alive beside every layer, unless the head is a unit of its
    own. The embedding's gradient appears when the microbatch's activations are freed. A pipeline's loop refers to the
    last logits. After the last microbatch it reduces unit by unit, while the other units are whole: of the first large
    unit it holds the sum, its copy for the reduction and the result, and no weights. Interleaved stages reduce the head
    with their last chunk, and the embedding after all later chunks, whose gathered weights are freed by then. If the
    microbatches are one round, the earlier chunks have no gradients when the head is reduced.

    A chunk's pass for weights leaves gradients of all its weights in the compute precision. FSDP2 adds them to their
    sums in the chunk's next backward pass, our trainer at once.

    stored: bytes of the stage's stored activations at their peak.

    Source: torch, distributed/fsdp/_fully_shard/_fsdp_param_group.py (post_backward), _fsdp_collectives.py
    (foreach_reduce); distributed/pipelining/stage.py (perform_reduce_grad); counted in the trainer's own step,
    tests/cost/test_memory.py.
    """
    if job.engine.memory.whole_gradients != "piped" or job.training.lora_rank:
        return 0.0, 0.0
    weights, grads, ranks = job.state_bytes.weights, job.state_bytes.grads, shard_degree(layout)
    whole, chunks = whole_gradients(job, layout) * 1.0, layout.interleave
    head = holds_head(layout, stage) * head_params_on_device(job.model, job.engine, layout)
    ends = end_params(job, layout, stage)
    embedding = holds_embedding(stage) * (ends - head * (not job.model.tied_embeddings))
    waits = weights * head * (weights < grads and not job.engine.memory.gathers_head_apart)
    piped = np.greater(layout.pp, 1)
    logits = piped * holds_head(layout, stage) * job.compute_bytes * num_logits(job, layout)

    body, early = _params_of_layers(job, layout, stage), reduced_early(job, layout, stage)
    alone = (layout.schedule == "interleaved") & is_one_round(layout.pp, num_microbatches(job, layout))
    each = np.maximum(stage.num_layers, 1)
    first, last = (1.0 / chunks if of is None else of / each for of in (stage.largest_chunk, stage.last_chunk))
    missing = alone * grads * body * (1.0 - early * (1.0 - 1.0 / ranks) - last)
    gone = body * (weights * (1.0 - first) + grads * (1.0 - 1.0 / ranks) * (1.0 - first - early))

    copied = (grads * (1.0 + 1.0 / ranks) - weights) * np.greater(ranks, 1)
    layer = largest_layer(job, layout, stage)
    freed = kept_activation_bytes(job, layout, stage)[0] / chunks
    moments: tuple[Number, ...] = (
        np.where(piped, copied * head + logits - missing - stored, copied * layer + waits - freed / each),
        piped * (copied * np.maximum(embedding, layer) - gone - stored),
        waits + weights * embedding + logits * np.equal(chunks, 1) - alone * gone - freed,
    )
    if layout.schedule in ("zbv", "dualpipev"):
        rests = (weights < grads) * weights * (body / (chunks if job.engine.memory.gradients_apart else 1) + head)
        moments = (*moments, logits + rests + _left_by_weight_pass(job, layout, stage) / chunks)
    beside, at_end = np.maximum(waits + logits - missing, 0.0), np.maximum(reduce(np.maximum, moments), 0.0)
    return whole * beside, whole * at_end


def _left_by_weight_pass(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes that a microbatch's pass for weights holds at its end, beyond those before it, in torch's stages.

    The gradients of outputs are gone. Tensors that were computed again and that no matrix and no norm reads stay until
    the pass ends. torch runs a pass for each matrix and each norm, of which each computes its layer again, and keeps
    what it does not read. Our trainer lets these passes share what is computed again.

    Source: torch, distributed/pipelining/_backward.py (stage_backward_weight), utils/checkpoint.py (GraphExecGroup);
    counted in the trainer's own step, tests/cost/test_memory.py.
    """
    again = by_policy(layout, stage, lambda policy: float(policy == FULL))
    kept, waits = kept_activation_bytes(job, layout, stage)
    left = kept - waits
    for kind, count in layer_kinds(job, layout, stage):
        matrices = sum(len(each.outputs) for each in layer_of(job.model, experts=kind).products)
        passes = 1 if job.engine.memory.gradients_apart else matrices + job.model.norms_per_layer
        terms = activation_terms(job, layout, experts=kind)
        unread = [each for each in terms if "input" not in each.name and each.name not in ("residual", "latents")]
        sizes = (each.num_bytes * (1.0 - each.saved * each.name.endswith(" inner")) for each in unread)
        left = left + count * passes * again * sum_of(sizes)
    return left


@once
def model_state_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Number, Number, Number]:
    """Bytes of weights, gradients and optimizer state of one device; experts use their own shard group.

    Source: `state_bytes_per_param`, and further state of the optimizer.
    """
    held, frozen = trained_params(job, layout, stage), frozen_bytes(job, layout, stage)
    more, more_routed = extra_moment_bytes(job, layout, stage)  # of optimizers that no host runs
    common = state_bytes_per_param(job, layout)
    weights, grads, optimizer = (each * held.common for each in common)
    idle = _idle_head_params(job, layout, stage)
    optimizer = optimizer + (more - moment_bytes_per_param(job) * idle) / shard_degree(layout)
    grads = grads - common[1] * idle
    grads = grads + job.state_bytes.grads * cut_gradient_params(job, layout)
    reduced, body = reduced_early(job, layout, stage), np.maximum(held.common - end_params(job, layout, stage), 0.0)
    grads = grads - reduced * (1.0 - 1.0 / shard_degree(layout)) * common[1] * body
    sharded = np.greater_equal(layout.zero, 3)
    frozen_shard = shard_of(job, layout, frozen)
    at_home = frozen_shard * (not gathers_from_host(job, layout))
    weights = weights + np.where(sharded, at_home, frozen.common + frozen.experts)
    if not job.state_bytes.sharded_weights:  # gathered weights are copies, and shards of frozen weights have no master
        copies = np.equal(layout.zero, 2) & np.greater(shard_degree(layout), 1)
        weights = weights + copies * frozen_shard
    weights = weights + low_precision_bytes(job, layout, stage)
    if constants := constant_bytes_per_param(job):
        weights = weights + constants * _params_of_layers(job, layout, stage)
    if job.model.moe is None:
        return weights, grads, optimizer
    routed = [each * held.experts for each in state_bytes_per_param(job, layout, experts=True)]
    optimizer = optimizer + routed[2] + more_routed / expert_shard_divisor(job, layout)
    left = 1.0 - reduced * (1.0 - 1.0 / expert_shard_divisor(job, layout))
    return weights + routed[0], grads + left * routed[1], optimizer


def _idle_head_params(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Parameters on a device of an untied head that has no gradient, so that the optimizer makes no moments of it.

    Source: torch.optim.AdamW, which makes moments at the first gradient; DeepSpeed's flat shards hold every parameter.
    """
    flat, idle = job.engine.memory.bucket_buffers > 0, not job.training.method.reads_logits
    if flat or not idle or job.training.lora_rank or job.model.tied_embeddings or offloads_optimizer(layout):
        return 0.0
    return holds_head(layout, stage) * head_params_on_device(job.model, job.engine, layout)


def reference_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the weights of a reference model on one device of a stage.

    ZeRO-3 shards the weights like those of the trained model, and keeps the shards where those are. In ZeRO-2 of
    engines whose gathered weights are copies, no backward pass follows that would free the copies. All other ranks hold
    the weights whole.

    Source: TRL f2cd5771, models/utils.py (prepare_deepspeed: ZeRO-3 with the policy's offload_param, or none;
    prepare_fsdp: the policy's offload_policy); engine profile, reference_bytes.
    """
    held, each = held_params(job, layout, stage), job.engine.memory.reference_bytes
    shard, zero = each * shard_of(job, layout, held), layout.zero
    copies = np.equal(zero, 2) & (not job.state_bytes.sharded_weights)
    at_home = shard * (not gathers_from_host(job, layout))
    own = np.where(np.greater_equal(zero, 3), at_home, np.where(copies, shard, each * held.total))
    return own + copies * job.state_bytes.weights * held.total


def low_precision_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the low-precision weight copies, and of their transposes, that matrix products read.

    Source: Transformer Engine, pytorch/module/base.py (quantize_weight, cached over microbatches); Megatron-LM,
    --fp8-param-gather, which only its distributed optimizer has, keeps no other weights.
    """
    of_precision = {"fp8": 1.0, "fp4": 0.5}.get(job.training.precision, 0.0)
    each = job.engine.memory.fp8_weight_bytes * of_precision
    if not each or (job.training.lora_rank and job.engine.memory.fp8_frozen_bytes):  # no 16-bit weights beside them
        return 0.0
    return np.equal(layout.zero, 0) * each * _params_of_layers(job, layout, stage)


def _params_of_layers(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Parameters on one device of a stage without those outside the layers."""
    return np.maximum(held_params(job, layout, stage).total - end_params(job, layout, stage), 0.0)


def host_state_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes on the host for the shards of one device of a stage; experts use their own shard group.

    Source: `host_state_bytes_per_param`, and further state of the optimizer. DeepSpeed, runtime/zero/stage3.py
    (grad_partitions_flat_buffer): ZeRO-3 sums the gradients there, too; tests/executed counts both.
    """
    held, each = trained_params(job, layout, stage), host_state_bytes_per_param(job)
    if job.engine.offload.optimizer_takes == "gradients":
        each = each + np.greater_equal(layout.zero, 3) * job.state_bytes.grads
    more, more_routed = extra_moment_bytes(job, layout, stage)
    states = HeldParams(common=each * held.common + more, experts=each * held.experts + more_routed)
    return shard_of(job, layout, states)


def host_param_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes on the host for the shards of weights that ZeRO-3 gathers, of one device of a stage.

    Trained weights are among the states that the host updates, if the engine gathers these.

    Source: DeepSpeed, runtime/zero/partition_parameters.py (pinned copies in the training precision); as
    `reference_bytes`.
    """
    trained = shard_of(job, layout, trained_params(job, layout, stage))
    own = job.state_bytes.weights * offloads_params(layout) * trained + host_frozen_bytes(job, layout, stage)
    if job.training.reference_at != "resident":
        return own
    reference = job.engine.memory.reference_bytes * shard_of(job, layout, held_params(job, layout, stage))
    return own + np.greater_equal(layout.zero, 3) * reference


def host_frozen_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes on the host for the shards of frozen weights that ZeRO-3 gathers, of one device of a stage.

    Source: torch FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param.py (offload_to_cpu: every parameter of a unit);
    DeepSpeed, runtime/zero/partition_parameters.py.
    """
    at_host = np.greater_equal(layout.zero, 3) & gathers_from_host(job, layout)
    return at_host * shard_of(job, layout, frozen_bytes(job, layout, stage))
