"""The null model, a forecast that ours must beat: every GPU reaches the median rate of its kind, for any layout."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from planner.cost.flops import model_flops_per_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.evidence.compare.score import Row


class _Rated(NamedTuple):
    row: int
    source: str
    flops: float  # FLOPs of one device in the row's step
    rate: float


def null_seconds(rows: Sequence[Row]) -> dict[int, float]:
    """Index of a row -> seconds that the null model predicts, for rows that were priced.

    The rate is the median of the rows with the same device, precision class and experts in other sources, so that no
    row is predicted from its own sweep. If no other source measured such rows, there is no null prediction.
    """
    kinds: dict[tuple[str, str, bool], list[_Rated]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.setup is None or not row.measured_seconds or row.predicted_seconds is None:
            continue
        job, layout = row.setup.job, row.setup.layout
        flops = model_flops_per_step(job.model, job.training) * row.setup.share / layout.world_size
        kind = (job.cluster.device.name, job.training.precision[-2:], job.model.moe is not None)
        kinds[kind].append(_Rated(index, row.run.source_set, flops, flops / row.measured_seconds))
    return {
        rated.row: rated.flops / median(others)
        for members in kinds.values()
        for rated in members
        if (others := [other.rate for other in members if other.source != rated.source])
    }
