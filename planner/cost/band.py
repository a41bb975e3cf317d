"""How far off a forecast may be, from how far off the forecasts of published runs were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.specs.calibration import precision_class
from planner.specs.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterable

    from planner.layout import Layout
    from planner.specs.calibration import Evidence
    from planner.specs.job import Job

_UNLIKE: Final = 0.4
"""Weight of a published run for each key in which it differs: device, engine, precision, experts, axes. Assumed: the
quantiles below were chosen with it, by how many held-out runs lie between them. The width of bands that hold as many,
for values from 0.2 to 1, would settle it."""

_QUANTILES: Final = (0.08, 0.92)
"""Of the weighted errors. On folds by model size 78 % of runs lie between them, by source 82 %: the 10 % and 90 %
quantiles proper are too narrow, because what is held out is always less alike than what is left."""

_WIDER: Final = {"device": 1.5, "engine": 1.5, "axes": 1.25}
"""Log width of the band for a value that no run has, times this: with whole devices, engines or kinds of axes held
out, 81 %, 82 % and 82 % of runs lie inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """8 of 10 runs like this one take between `low` and `high` times the forecast.

    num_near: published runs on the same device, engine and axes. unseen: which of these no published run has.
    axes: of this layout, see `axes_of`.
    """

    low: float
    high: float
    num_near: int = 0
    unseen: tuple[str, ...] = ()
    axes: str = ""


def axes_of(layout: Layout) -> str:
    """What divides the work beyond plain data parallelism: `tp+pp`, `ep+fsdp` (ZeRO-2 and 3), or `dp` for nothing."""
    names = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) > 1]
    if layout.zero >= 2 and layout.dp * layout.cp > 1:
        names.append("fsdp")
    return "+".join(names) or "dp"


def band(job: Job, layout: Layout) -> Band | None:
    """The error band of a forecast; None for a CPU and a mixed cluster, and without evidence.

    Nobody published runs of those. A calibration of the user's own that states its quantiles is believed.
    """
    if len(job.pools) > 1:
        return None
    (pool,) = job.pools
    own = pool.calibration
    if own.low and own.high:
        return Band(low=own.low, high=own.high, num_near=own.num_rows, axes=axes_of(layout))
    if not job.evidence or pool.cluster.device.kind == "cpu":
        return None
    return band_of(
        job.evidence,
        device=pool.cluster.device.name,
        engine=job.engine.name,
        precision=precision_class(job.training.precision),
        experts=job.model.moe is not None,
        axes=axes_of(layout),
    )


def band_of(evidence: Iterable[Evidence], **keys: Any) -> Band:
    """The band from held-out errors, in which each run counts by how much it is like `keys`.

    Source: weighted quantiles of log(measured / predicted); split conformal prediction (Lei et al., JASA 2018) with
    weights for likeness.
    """
    evidence = tuple(evidence)
    logs = np.log(np.concatenate([each.ratios for each in evidence]))
    likeness = [_UNLIKE ** sum(getattr(each, key) != value for key, value in keys.items()) for each in evidence]
    weights = np.repeat(likeness, [len(each.ratios) for each in evidence])
    order = np.argsort(logs)
    level = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    unseen = tuple(key for key in _WIDER if all(getattr(each, key) != keys[key] for each in evidence))
    wider = float(np.prod([_WIDER[key] for key in unseen]))
    low, high = np.exp(wider * np.interp(_QUANTILES, level, logs[order]))
    near = [each for each in evidence if all(getattr(each, key) == keys[key] for key in _WIDER)]
    return Band(
        low=min(float(low), 1.0),
        high=max(float(high), 1.0),
        num_near=sum(len(each.ratios) for each in near),
        unseen=unseen,
        axes=keys["axes"],
    )
