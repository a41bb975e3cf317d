"""Seconds of offloading: copies to the host's memory and back, and updates that the host computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.activations import kept_activation_bytes
from planner.cost.adapters import trained_params
from planner.cost.compute import PassSeconds
from planner.cost.model_states import gathers_from_host, host_frozen_bytes, host_state_bytes_per_param, whole_gradients
from planner.cost.stage import shard_of
from planner.cost.traffic import BesideSeconds
from planner.layout import offloads_activations, offloads_optimizer

if TYPE_CHECKING:
    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.numbers import Number
    from planner.specs.job import PoolJob

_GRADIENT_BYTES: Final = 4.0
"""Bytes per parameter of the gradients copied to the host, which are fp32."""


def _copy_seconds(job: PoolJob, num_bytes: Number) -> Number:
    host = job.cluster.host
    assert host is not None, "only clusters that describe their hosts offload"
    return num_bytes / (host.bandwidth * host.efficiency)


def host_update_seconds(job: PoolJob, num_params: Number) -> Number:
    """Seconds that a host needs to update one device's shard of `num_params` parameters, along with its other shards.

    The update reads gradients, reads and writes weights and moments, and writes the weights that the device computes
    with. For AdamW in mixed precision this moves 30 bytes per parameter, at the device's part of the host's memory
    bandwidth.

    Source: Ren et al., ZeRO-Offload (USENIX ATC 2021), section 5.1 and table 4; engine profile, host_update_factor.
    """
    host = job.cluster.host
    assert host is not None, "only clusters that describe their hosts offload"
    states = 2.0 * host_state_bytes_per_param(job) - _GRADIENT_BYTES
    each = job.engine.offload.host_update_factor * (states + job.compute_bytes)
    rate = host.memory_bandwidth * host.memory_efficiency / job.cluster.devices_per_host
    return each * num_params / rate + job.launch_seconds


def host_copy_seconds(job: PoolJob, layout: Degrees, stage: Stage, window: PassSeconds) -> BesideSeconds:
    """Seconds of copies between a device and its host, and the part that is exposed in the step.

    Activations are copied to the host in the forward pass and back in the backward pass. Gradients of the shard are
    copied to the host whenever they are reduced. Weights of the shard are copied back once a step, or for each all-
    gather if the host also holds the weight shards, those of frozen weights included; forward passes without gradients,
    of the policy or a reference, gather again. If copies overlap with computing, only the part that takes longer than
    the stage's layers is exposed.

    Source: Ren et al., ZeRO-Offload (2021), section 4; torch FSDP2, torch/distributed/fsdp/_fully_shard/
    _fsdp_param_group.py (CPUOffloadPolicy).
    """
    forward: Number = 0.0
    backward: Number = 0.0
    once: Number = 0.0
    if offloads_activations(layout):
        forward = backward = _copy_seconds(job, kept_activation_bytes(job, layout, stage)[0])
    if offloads_optimizer(layout):
        shard = shard_of(job, layout, trained_params(job, layout, stage))
        gradients = _copy_seconds(job, _GRADIENT_BYTES * shard)
        each_time = np.greater_equal(layout.zero, 2) & ~np.asarray(whole_gradients(job, layout))
        states = job.state_bytes
        weights = _copy_seconds(job, (states.sharded_weights or states.master or states.weights) * shard)
        gathers = np.greater_equal(layout.zero, 3) & gathers_from_host(job, layout)
        gathered = np.where(gathers, weights, 0.0) + _copy_seconds(job, host_frozen_bytes(job, layout, stage))
        forward = forward + gathered * (1 + job.training.ungraded_passes)
        backward = backward + gathered + np.where(each_time, gradients, 0.0)
        once = np.where(each_time, 0.0, gradients) + np.where(gathers, 0.0, weights)
    busy = forward + backward
    if layout.offload != "none" and job.engine.overlap.offload:
        forward = np.maximum(0.0, forward - window.forward)
        backward = np.maximum(0.0, backward - window.backward)
    return BesideSeconds(
        busy_each=busy,
        exposed=PassSeconds(forward=forward, backward_input=backward),
        busy_once=once,
        exposed_once=once,
    )
