"""Who waits for whom in a pipeline: step time, bubble, and microbatches in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from planner.specs.engine import Schedule

__all__ = ["bubble_seconds", "in_flight_microbatches", "pipeline_seconds", "steady_seconds"]


def steady_seconds(num_microbatches: Any, slowest_stage_seconds: Any) -> Any:
    """Seconds in which the slowest stage works: m t_max.

    Source: Narayanan et al. (SC 2021), section 2.2: the ideal time m (t_f + t_b).
    """
    return num_microbatches * slowest_stage_seconds


def bubble_seconds(sum_of_stage_seconds: Any, slowest_stage_seconds: Any, interleave: Any) -> Any:
    """Seconds in which the slowest stage waits for the pipeline to fill and drain: (sum_r t_r - t_max) / v.

    With equal stages this is (p - 1) t / v, so that the bubble is (p - 1) / (v m) of the steady time. GPipe
    and 1F1B are equal here. `t_r` is the time of one microbatch through all chunks of stage r, forward and
    backward. Exact for equal stages, for GPipe, and for 1F1B whose slowest stage is the last; a slow early
    stage of 1F1B fills part of its wait with forward passes, so that the form is then too long by less than one
    pass through the other stages (checked by event simulation).

    Source: Narayanan et al. (SC 2021), sections 2.2.1 and 2.2.2.
    """
    return (sum_of_stage_seconds - slowest_stage_seconds) / interleave


def pipeline_seconds(num_microbatches: Any, stage_seconds: Any, interleave: Any) -> Any:
    """Seconds of all microbatches through the pipeline; `stage_seconds` has shape (stages,) or (..., stages).

    Source: sum of `steady_seconds` and `bubble_seconds`.
    """
    slowest = np.max(stage_seconds, axis=-1)
    total = np.sum(stage_seconds, axis=-1)
    return steady_seconds(num_microbatches, slowest) + bubble_seconds(total, slowest, interleave)


def in_flight_microbatches(schedule: Schedule, pp: Any, stage: Any, num_microbatches: Any, interleave: Any) -> Any:
    """Microbatches whose activations a stage holds at its peak, in units of the whole stage.

    naive 1; GPipe m; 1F1B min(m, p - r); interleaved min(m v, 2 (p - r - 1) + (v - 1) p + 1) / v, which is
    p (1 + (p - 1) / (p v)) on the first stage.

    Source: Huang et al., GPipe (2019); Narayanan et al. (SC 2021), section 2.2; Megatron-LM,
    core/pipeline_parallel/schedules.py (warm-up of the interleaved schedule); Korthikanti et al. (2022), 4.2.3.
    """
    m = num_microbatches
    if schedule == "naive":
        return np.ones(np.broadcast_shapes(np.shape(pp), np.shape(stage), np.shape(m)))
    if schedule == "gpipe":
        return m + 0 * np.asarray(stage)
    if schedule == "1f1b":
        return np.minimum(m, pp - stage)
    if schedule == "interleaved":
        chunks = 2 * (pp - stage - 1) + (interleave - 1) * pp + 1
        return np.minimum(m * interleave, chunks) / interleave
    raise ValueError(f"schedule {schedule!r} is not priced")
