"""The expected range of a plan's peak memory, and whether a device has this memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from planner.cost.memory_band import memory_distribution
from planner.specs.document import Document

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.specs.job import Job


class MemoryBand(Document):
    """The range that contains the peak of 8 of 10 runs like the plan.

    The allocator may hold more memory as long as memory is free.
    """

    stage: int = Field(description="number of the fullest stage")
    low_bytes: float
    high_bytes: float
    chance_of_fitting: float = Field(description="chance that the peak is at most the whole memory of the device")


def memory_band_of(job: Job, plan: Plan) -> MemoryBand | None:
    """The band of the fullest stage's peak; None for a mixed cluster, for a CPU, and without evidence."""
    if len(job.pools) > 1 or job.pools[0].cluster.device.kind == "cpu":
        return None
    found = memory_distribution(job, plan.layout)
    if found is None:
        return None
    stage = max(plan.memory, key=lambda each: each.total_bytes)
    whole = job.pools[0].cluster.device.memory
    return MemoryBand(
        stage=stage.stage,
        low_bytes=stage.total_bytes * found.quantile(0.1),
        high_bytes=stage.total_bytes * found.quantile(0.9),
        chance_of_fitting=found.chance(whole / stage.total_bytes),
    )
