"""What the cost model does not price yet: said plainly, never priced wrongly in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.layout import Layout
    from planner.specs.job import Job

__all__ = ["unpriced"]


def unpriced(job: Job, layout: Layout) -> tuple[str, ...]:
    """Reasons why an estimate of this layout would mean nothing; empty when it is priced."""
    reasons = []
    if job.model.moe is not None:
        reasons.append("mixture of experts")
    if job.model.mla is not None:
        reasons.append("latent attention")
    if layout.cp > 1:
        reasons.append("context parallelism")
    if layout.ep > 1 or layout.etp > 1:
        reasons.append("expert parallelism")
    if job.training.precision in ("fp8", "fp4"):
        reasons.append(f"{job.training.precision} training")
    if layout.offload != "none":
        reasons.append("offload")
    if layout.schedule not in ("naive", "gpipe", "1f1b", "interleaved"):
        reasons.append(f"schedule {layout.schedule}")
    return tuple(reasons)
