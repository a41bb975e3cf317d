"""Compute the keys of simplicity of configurations, columns and layouts from their prices and memory."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.chance import largest_peak_bytes, spread_of
from planner.cost.estimate import estimate
from planner.cost.prices import layout_prices, stage_bytes, stage_prices
from planner.cost.stage import pool_indices
from planner.search.optimum.pricing import figures_of_columns
from planner.search.optimum.simplicity import (
    INTERLEAVES,
    RISKS,
    TENTHS,
    Rated,
    Simplicity,
    class_of,
    tenths_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.cost.stage import Stage
    from planner.layout import Degrees, Layout
    from planner.numbers import FloatArray, IntArray, Number
    from planner.search.optimum.candidate import Candidate
    from planner.search.space.configurations import DegreeArrays
    from planner.specs.job import Job, PoolJob

AXES: Final = ("tp", "pp", "cp", "ep")
"""Degrees that divide the model or a sequence; data parallelism is left out, because every job has it."""
_ROUNDING: Final = 1e-6  # tenths of a layer


def risk_limits(job: PoolJob, layout: Degrees) -> tuple[float, ...]:
    """The largest peak in bytes of each class of risk; empty if a plain limit replaces the chance of fitting.

    Source: `planner.cost.chance`.
    """
    if job.headroom is not None:
        return ()
    spread = spread_of(job, layout)
    return tuple(float(largest_peak_bytes(job.whole_memory_bytes, spread, 1 - risk)) for risk in RISKS)


def rated(job: Job, degrees: DegreeArrays, candidates: Sequence[Candidate]) -> list[Rated]:
    """Candidates of one schedule, with the keys of the candidates and of their columns."""

    def figures(pool: PoolJob, x: DegreeArrays, stage: Stage) -> tuple[Number, ...]:
        peak, prices = stage_bytes(pool, x, stage), stage_prices(pool, x, stage)
        risk = sum((np.greater(peak, limit) for limit in risk_limits(pool, degrees)), np.zeros(np.shape(peak)))
        return risk, _repeated(prices.recompute, prices.forward, stage.num_layers)

    risk, repeated = (each.astype(np.int64) for each in figures_of_columns(job, degrees, candidates, figures)[:2])
    ends = np.cumsum([0, *(each.num_columns for each in candidates)])
    keys = configuration_keys(job, degrees).tolist()
    found = []
    for number, (first, last) in enumerate(pairwise(ends.tolist())):
        idle, interleave, axes = keys[number]
        found.append(
            Rated(
                candidate=candidates[number],
                idle=idle,
                interleave=interleave,
                axes=axes,
                risk=risk[first:last],
                repeated=repeated[first:last],
                alike=candidates[number].layers == candidates[number].last * degrees.interleave[number],
            )
        )
    return found


def configuration_keys(job: Job, degrees: DegreeArrays) -> IntArray:
    """Keys of configurations, [n, 3]: idle devices, class of interleave, number of axes."""
    idle = job.cluster.num_devices - degrees.world_size
    interleave = sum((degrees.interleave > limit).astype(np.int64) for limit in INTERLEAVES)
    axes = sum((getattr(degrees, axis) > 1).astype(np.int64) for axis in AXES)
    return np.stack([idle, interleave, axes], axis=1)


def _repeated(recompute: Number, forward: Number, num_layers: Number) -> Number:
    """Tenths of layers that a stage recomputes, rounded up, from its recompute seconds and forward seconds."""
    share = np.minimum(1.0, recompute / np.where(forward > 0, forward, 1.0))
    return np.ceil(TENTHS * share * num_layers - _ROUNDING)


def simplicity_of(job: Job, layout: Layout) -> Simplicity:
    """The keys of a layout."""
    prices, pools = layout_prices(job, layout), pool_indices(job, layout).tolist()
    peaks = [stage.total_bytes for stage in estimate(job, layout).memory]
    layers = np.array([layout.layers_of_stage(stage) for stage in range(layout.pp)])
    repeated: FloatArray = np.broadcast_to(_repeated(prices.recompute, prices.forward, layers), layers.shape)
    inner = [[layout.layers_per_stage[chunk] for chunk in layout.chunks_of_stage(r)] for r in range(1, layout.pp - 1)]
    return Simplicity(
        risk=max(class_of(peak, risk_limits(job.pools[pool], layout)) for peak, pool in zip(peaks, pools, strict=True)),
        idle=job.cluster.num_devices - layout.world_size,
        recomputed=tenths_of(int(repeated.sum()), job.model.num_layers),
        interleave=class_of(layout.interleave, INTERLEAVES),
        uneven=int(len({size for chunks in inner for size in chunks}) > 1),
        axes=sum(getattr(layout, axis) > 1 for axis in AXES),
    )
