"""The memory ledger of one device and of its host: states, activations, transients and the runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.activations import device_activation_bytes, offloaded_activation_bytes
from planner.cost.ledger import LineName, MemoryLine
from planner.cost.microbatch import num_microbatches
from planner.cost.model_states import (
    gathers_from_host,
    host_param_bytes,
    host_state_bytes,
    model_state_bytes,
    reference_bytes,
)
from planner.cost.schedule import weight_versions
from planner.cost.transients import transient_bytes
from planner.cost.vision import tower_bytes_at_peak
from planner.layout import offloads_activations, offloads_optimizer, offloads_params
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.cost.stage import Stage
    from planner.layout import Degrees
    from planner.numbers import Number
    from planner.specs.job import PoolJob


CACHED_SHARE: Final = 1 / 3
"""Memory that PyTorch's allocator caches beyond the allocated bytes, as a share of activations and transients.

Source: runs that report both allocated and reserved bytes: 0.24 to 0.41 in six runs of Megatron on B200 (SimuMax's
table), and 0.3 in the median of 130 runs of nanotron on H100 with tp of at most 4; and the readings of nvidia-smi in 57
pipelined runs that tuned BLOOM. If memory is short, the allocator frees the cache first (PyTorch, notes on CUDA memory
management). The cache is therefore part of the forecast of a counter that includes it, but does not affect the verdict
whether a layout fits.
"""


def _runtime_bytes(job: PoolJob, layout: Degrees, used: Number) -> Number:
    """Bytes of the device context, of communication buffers, and of the allocator's fragmentation.

    Source: device file, reserved_memory; engine profile, communicator_memory and fragmentation.
    """
    axes = (layout.tp, layout.pp, layout.dp * layout.cp, layout.ep)
    groups = sum_of(np.greater(degree, 1) * 1.0 for degree in axes)
    buffers = job.cluster.device.reserved_memory + (job.engine.memory.communicator_memory or 0.0) * groups
    return buffers + job.engine.memory.fragmentation * used


def memory_lines(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[MemoryLine, ...]:
    """The memory ledger of one device of a stage at its peak; every line broadcasts over layouts and stages.

    The peak is in the backward pass of the first microbatch, or in the update if the update needs more. During the
    backward pass the memory holds the states, all stored activations, and the larger of the loss and one recomputed
    layer.

    Source: each line names its own.
    """
    m = num_microbatches(job, layout)
    weights, grads, states = model_state_bytes(job, layout, stage)
    weights = weights * weight_versions(layout.schedule, layout.pp, stage.index, m)
    stashed = " * versions (weight stashing)" if layout.schedule == "pipedream" else ""
    stored = device_activation_bytes(job, layout, stage, m) + tower_bytes_at_peak(job, layout, stage, m)
    transient = transient_bytes(job, layout, stage, stored)
    cut = " + whole matrices that the borders of shards cut" * (job.engine.memory.bucket_buffers > 0)
    zero, cached = "Rajbhandari et al., ZeRO (SC 2020); engine profile", _runtime_bytes(job, layout, stored + transient)
    tower = ", and of the tower of images without recompute" if job.model.vision else ""
    return _lines(
        (LineName.PARAMS, weights, f"{_STAGE} weight bytes (/ shard degree from ZeRO-3){stashed}", zero),
        (LineName.GRADS, grads, f"{_STAGE} gradient bytes (/ shard degree from ZeRO-2{cut})", zero),
        (LineName.OPTIMIZER_STATE, states, f"{_STAGE} (master weights + moments) (/ shard degree from ZeRO-1)", zero),
        (LineName.ACTIVATIONS, stored, _KEPT + tower, _OF_KEPT),
        (LineName.TRANSIENTS, transient, _SHORT, "Korthikanti et al. (2022), section 5; torch FSDP2 prefetch"),
        (LineName.RUNTIME, cached, _RUNTIME, "device file, reserved_memory; engine profile, fragmentation"),
        *_other_models(job, layout, stage),
    )


def _other_models(job: PoolJob, layout: Degrees, stage: Stage) -> Iterator[tuple[LineName, Number, str, str]]:
    """Lines of what holds memory beside the trained model during a step: a reference model, and a rollout engine."""
    if job.training.reference_at == "resident":
        held, words = reference_bytes(job, layout, stage), f"{_STAGE} bytes of the reference (/ shard degree in ZeRO-3)"
        yield LineName.REFERENCE_PARAMS, held, words, "TRL, models/utils.py (prepare_deepspeed, prepare_fsdp)"
    if share := job.training.rollout_memory:
        held = share * job.whole_memory_bytes
        yield LineName.ROLLOUT, held, "share of the device's memory (rollout_memory)", "vLLM, gpu_memory_utilization"


_STAGE: Final = "parameters of the stage / tp *"
_SHARD: Final = "parameters of the stage / tp / shard degree *"
_KEPT: Final = "bytes per layer under the recompute policy * layers * microbatches in flight"
_OF_KEPT: Final = "Korthikanti et al. (2022), sections 4.1 to 4.3"
_SHORT: Final = (
    "max(logits and loss, one recomputed layer and its gathered ZeRO units) + gathered ends,"
    " or what the update takes beyond the activations"
)
_RUNTIME: Final = "device context and communication buffers + allocator's share of activations and transients"


def _lines(*lines: tuple[LineName, Number, str, str]) -> tuple[MemoryLine, ...]:
    names = ("name", "num_bytes", "formula", "source")
    return tuple(MemoryLine(**dict(zip(names, each, strict=True))) for each in lines)


def host_lines(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[MemoryLine, ...]:
    """Lines of one device of a stage in its host's memory; empty if the layout offloads nothing.

    Source: each line names its own.
    """
    lines: list[tuple[LineName, Number, str, str]] = []
    if offloads_optimizer(layout):
        held, source = host_state_bytes(job, layout, stage), "Ren et al., ZeRO-Offload (2021), section 3"
        lines.append((LineName.OPTIMIZER_STATE, held, f"{_SHARD} (fp32 gradients + master weights + moments)", source))
    others = job.training.lora_rank or job.training.reference_at == "resident"  # beside the states of trained weights
    if offloads_params(layout) or (others and gathers_from_host(job, layout)):
        held, source = host_param_bytes(job, layout, stage), "DeepSpeed, runtime/zero/offload_config.py (offload_param)"
        lines.append((LineName.PARAMS, held, f"{_SHARD} weight bytes", source))
    if offloads_activations(layout):
        held = offloaded_activation_bytes(job, layout, stage, num_microbatches(job, layout))
        lines.append((LineName.ACTIVATIONS, held, _KEPT, _OF_KEPT))
    return _lines(*lines)
