"""Layouts that the cost model does not price, because it would price them wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.cost.schedule import exists

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.specs.job import PoolJob


def unpriced(job: PoolJob, layout: Layout) -> tuple[str, ...]:
    """Reasons why an estimate of this layout would have no meaning; empty if the layout can be priced."""
    reasons = []
    if job.core_precision not in job.cluster.device.peak or job.training.precision not in job.cluster.device.peak:
        reasons.append(f"{job.training.precision} on {job.cluster.device.name}")
    if layout.offload != "none" and job.cluster.host is None:
        reasons.append(f"offload: {job.cluster.name} does not say what memory its hosts have")
    m = layout.num_microbatches(job.training.global_batch_size)
    if layout.schedule in ("zbv", "dualpipev") and not exists(layout.schedule, layout.pp, m, layout.interleave):
        reasons.append(f"schedule {layout.schedule} of {layout.interleave} chunks and {m} microbatches")
    return tuple(reasons)
