"""The memory ledger of one device and of its host: states, activations, transients and the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
from planner.specs.yaml import shipped_yaml
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
    stored = device_activation_bytes(job, layout, stage, m) + tower_bytes_at_peak(job, layout, stage, m)
    transient = transient_bytes(job, layout, stage, stored)
    words = {
        "stashed": " * versions (weight stashing)" * (layout.schedule == "pipedream"),
        "cut": " + whole matrices that the borders of shards cut" * (job.engine.memory.bucket_buffers > 0),
        "tower": ", and of the tower of images without recompute" * (job.model.vision is not None),
    }
    return (
        _line(LineName.PARAMS, weights, **words),
        _line(LineName.GRADS, grads, **words),
        _line(LineName.OPTIMIZER_STATE, states),
        _line(LineName.ACTIVATIONS, stored, **words),
        _line(LineName.TRANSIENTS, transient),
        _line(LineName.RUNTIME, _runtime_bytes(job, layout, stored + transient)),
        *_other_models(job, layout, stage),
    )


def _other_models(job: PoolJob, layout: Degrees, stage: Stage) -> Iterator[MemoryLine]:
    """Lines of what holds memory beside the trained model during a step: a reference model, and a rollout engine."""
    if job.training.reference_at == "resident":
        yield _line(LineName.REFERENCE_PARAMS, reference_bytes(job, layout, stage))
    if share := job.training.rollout_memory:
        yield _line(LineName.ROLLOUT, share * job.whole_memory_bytes)


_SAID: Final[Any] = shipped_yaml(Path(__file__).with_name("memory_lines.yaml")).plain
"""Formula and source of the lines of memory."""


def _line(name: LineName, num_bytes: Number, of: str = "", **words: str) -> MemoryLine:
    """A line of memory, of the device or `of` its host; `words` are what the formula leaves open."""
    said = _SAID[f"{of}{name}"]
    return MemoryLine(name=name, num_bytes=num_bytes, formula=said["formula"].format(**words), source=said["source"])


def host_lines(job: PoolJob, layout: Degrees, stage: Stage) -> tuple[MemoryLine, ...]:
    """Lines of one device of a stage in its host's memory; empty if the layout offloads nothing.

    Source: each line names its own.
    """
    lines = []
    if offloads_optimizer(layout):
        lines.append(_line(LineName.OPTIMIZER_STATE, host_state_bytes(job, layout, stage), "host "))
    others = job.training.lora_rank or job.training.reference_at == "resident"  # beside the states of trained weights
    if offloads_params(layout) or (others and gathers_from_host(job, layout)):
        lines.append(_line(LineName.PARAMS, host_param_bytes(job, layout, stage), "host "))
    if offloads_activations(layout):
        held = offloaded_activation_bytes(job, layout, stage, num_microbatches(job, layout))
        lines.append(_line(LineName.ACTIVATIONS, held, "host "))
    return tuple(lines)
