"""Whether a predicted peak of memory fits into a device: the chance, the verdict, and the limit that a chance sets.

The stages of a plan share their error: one program, one allocator and one fit of the same formulas are behind all of
them. Assumed: wholly, so that a plan fits when its worst stage does, and its chance is that of this stage. Were the
errors independent, the chance would be the product over the stages, which is less. Peaks of every stage of one run,
published for a few dozen runs, would settle how much of the error is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.memory_band import MemoryDistribution, memory_distribution

if TYPE_CHECKING:
    from planner.layout import Degrees
    from planner.numbers import Number
    from planner.specs.calibration import Spread
    from planner.specs.job import Job, PoolJob

UNLIKELY: Final = 0.05
"""A plan *does not fit* below this chance, whatever the risk that is taken; from 1 - risk it *fits*."""

_UNKNOWN: Final = MemoryDistribution(location=0.0, scale=0.1)
"""Where a calibration knows no peak of any run: 8 of 10 peaks within 17 %. Assumed; a run of the user's settles it."""


def spread_of(job: Job, layout: Degrees) -> MemoryDistribution:
    """Of measured over predicted bytes of a device, for one layout or many."""
    return memory_distribution(job, layout) or _UNKNOWN


def chance_of_fitting(peak_bytes: Number, whole_bytes: Number, spread: MemoryDistribution) -> Number:
    """Probability that a predicted peak stays within the whole memory that a program can have; broadcasts.

    spread: of measured over predicted bytes, of what a run needs.

    Source: the definition; `MemoryDistribution` names that of the distribution.
    """
    return spread.chance(whole_bytes / np.asarray(peak_bytes, dtype=np.float64))


def largest_peak_bytes(whole_bytes: Number, spread: MemoryDistribution, chance: Number) -> Number:
    """The largest predicted peak that fits with this chance, 0 < chance < 1; the inverse of `chance_of_fitting`.

    The error is a factor, so that a chance is a limit in bytes: whole / quantile(chance).

    Source: derived here; tested against draws.
    """
    return whole_bytes / spread.quantile(chance)


def spread_for(job: Job) -> Spread:
    """What `spread_of` reads of the calibration, for a plan to carry, so that it can be priced again."""
    engines, counters = (job.engine.name, None), ("device", "needed")
    memory = tuple(each for each in job.spread.memory if each.counter in counters and each.engine in engines)
    return job.spread.model_copy(update={"memory": memory})


def memory_limit_bytes(job: PoolJob, layout: Degrees) -> Number:
    """The largest predicted peak with which a layout fits, for one or for many.

    The chance of fitting sets it, 1 - risk; where headroom is asked for, what that leaves.

    Source: `largest_peak_bytes`.
    """
    return job.memory_share * _limit(job, layout, 1 - job.risk)


def most_peak_bytes(job: PoolJob, layout: Degrees) -> Number:
    """The largest predicted peak that may fit; beyond it a layout does not. With headroom it is the same limit.

    Source: `largest_peak_bytes`.
    """
    return _limit(job, layout, UNLIKELY)


def _limit(job: PoolJob, layout: Degrees, chance: float) -> Number:
    if job.headroom is not None:
        return job.whole_memory_bytes * (1 - job.headroom)
    return largest_peak_bytes(job.whole_memory_bytes, spread_of(job, layout), chance)
