"""A device that counts: with all but one resource free, seconds equal FLOPs or bytes."""

from __future__ import annotations

from dataclasses import replace

from planner.specs.calibration import UNCALIBRATED

FREE = 1e300


def counting(job, unit):
    """The job on a device that takes a second for each FLOP, or for each byte, and for nothing else."""
    rate = 1.0 if unit == "flops" else FREE
    device = job.cluster.device
    share = device.efficiency.model_copy(
        update={"matmul": 1.0, "matmul_half_depth": 0.0, "attention": 1.0, "memory": 1.0, "launch": 0.0}
        | {"layer_floor": 0.0, "attention_flash_2": None, "flops_per_exponential": 0.0}
    )
    values = {"peak": dict.fromkeys(device.peak, rate), "memory_bandwidth": FREE if unit == "flops" else 1.0}
    device = device.model_copy(update=values | {"num_processors": 1, "efficiency": share})
    return replace(job, cluster=job.cluster.model_copy(update={"device": device}), calibration=UNCALIBRATED)
