"""Bytes of weights, gradients and optimizer state, on the device and on its host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner.cost.adapters import CONSTANT_BYTES, frozen_bytes, trained_params
from planner.cost.optimizers import extra_moment_bytes, moment_bytes_per_param, sums_last
from planner.cost.parameters import layer_params_on_device
from planner.cost.stage import end_params, expert_shard_divisor, held_params, shard_degree, sum_over_layers
from planner.layout import offloads_optimizer, offloads_params
from planner.once import once

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
def model_state_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[Number, Number, Number]:
    """Bytes of weights, gradients and optimizer state of one device; experts use their own shard group.

    Source: `state_bytes_per_param`, and further state of the optimizer.
    """
    held, frozen = trained_params(job, layout, stage), frozen_bytes(job, layout, stage)
    more, more_routed = extra_moment_bytes(job, layout, stage)  # of optimizers that no host runs
    common = state_bytes_per_param(job, layout)
    weights, grads, optimizer = (each * held.common for each in common)
    optimizer = optimizer + more / shard_degree(layout)
    shards = np.greater_equal(layout.zero, 3)
    weights = weights + frozen.common / np.where(shards, shard_degree(layout), 1)
    weights = weights + frozen.experts / np.where(shards, expert_shard_divisor(job, layout), 1)
    if not job.state_bytes.sharded_weights:  # gathered weights are copies, and shards of frozen weights have no master
        copies = np.equal(layout.zero, 2) & np.greater(shard_degree(layout), 1)
        weights = weights + copies * frozen.common / shard_degree(layout)
        weights = weights + copies * frozen.experts / expert_shard_divisor(job, layout)
    weights = weights + low_precision_bytes(job, layout, stage)
    if constants := job.training.lora_rank and CONSTANT_BYTES[job.training.frozen_weights]:
        quantised = held_params(job, layout, stage).total - end_params(job, layout, stage)
        weights = weights + constants * np.maximum(quantised, 0.0)
    if job.model.moe is None:
        return weights, grads, optimizer
    routed = [each * held.experts for each in state_bytes_per_param(job, layout, experts=True)]
    optimizer = optimizer + routed[2] + more_routed / expert_shard_divisor(job, layout)
    return weights + routed[0], grads + routed[1], optimizer


def low_precision_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes of the low-precision weight copies, and of their transposes, that matrix products read.

    Source: Transformer Engine, pytorch/module/base.py (quantize_weight, cached over microbatches); Megatron-LM,
    --fp8-param-gather, which only its distributed optimizer has, keeps no other weights.
    """
    of_precision = {"fp8": 1.0, "fp4": 0.5}.get(job.training.precision, 0.0)
    each = job.engine.memory.fp8_weight_bytes * of_precision
    if not each or (job.training.lora_rank and job.engine.memory.fp8_frozen_bytes):  # no 16-bit weights beside them
        return 0.0
    on_layers = sum_over_layers(
        job, layout, stage, lambda kind: layer_params_on_device(job.model, layout, experts=kind).total
    )
    return np.equal(layout.zero, 0) * each * on_layers


def host_state_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes on the host for the shards of one device of a stage; experts use their own shard group.

    Source: `host_state_bytes_per_param`, and further state of the optimizer. DeepSpeed, runtime/zero/stage3.py
    (grad_partitions_flat_buffer): ZeRO-3 sums the gradients there, too; tests/executed counts both.
    """
    held, each = trained_params(job, layout, stage), host_state_bytes_per_param(job)
    if job.engine.offload.optimizer_takes == "gradients":
        each = each + np.greater_equal(layout.zero, 3) * job.state_bytes.grads
    more, more_routed = extra_moment_bytes(job, layout, stage)
    common = (each * held.common + more) / shard_degree(layout)
    routed = (each * held.experts + more_routed) / expert_shard_divisor(job, layout)
    return common + routed


def host_param_bytes(job: PoolJob, layout: Degrees, stage: Stage) -> Number:
    """Bytes on the host for the shards of weights that ZeRO-3 gathers, of one device of a stage.

    Source: DeepSpeed, runtime/zero/partition_parameters.py (pinned copies in the training precision).
    """
    held = trained_params(job, layout, stage)
    shards = held.common / shard_degree(layout) + held.experts / expert_shard_divisor(job, layout)
    return job.state_bytes.weights * shards
