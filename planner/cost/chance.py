"""Whether a predicted peak of memory fits into a device: the chance, the verdict, and the limit for a given chance.

The stages of a plan share their forecast error, because all of them run one program with one allocator, and one fit of
the same formulas predicts them. It is assumed that the stages share the whole error. So a plan fits if its worst stage
fits, and the plan's chance is the chance of this stage. If the errors were independent, the chance would be the product
over the stages, which is smaller. Peaks of every stage of one run, published for a few dozen runs, would settle how
much of the error is shared.
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
"""A plan *does not fit* below this chance, whatever risk the user accepts; it *fits* from a chance of 1 - risk on."""

_UNKNOWN: Final = MemoryDistribution(location=0.0, scale=0.1)
"""Distribution for a calibration without peaks of any run: 8 of 10 peaks within 17 %. Assumed; own runs settle it."""


def spread_of(job: Job, layout: Degrees) -> MemoryDistribution:
    """Distribution of the ratio measured / predicted bytes of a device, for one layout or many."""
    return memory_distribution(job, layout) or _UNKNOWN


def chance_of_fitting(peak_bytes: Number, whole_bytes: Number, spread: MemoryDistribution) -> Number:
    """Probability that a predicted peak stays within the whole memory that a program can have; broadcasts.

    spread: distribution of the ratio measured / predicted bytes, for the memory that a run needs.

    Source: the definition; `MemoryDistribution` names the source of the distribution.
    """
    return spread.chance(whole_bytes / np.asarray(peak_bytes, dtype=np.float64))


def largest_peak_bytes(whole_bytes: Number, spread: MemoryDistribution, chance: Number) -> Number:
    """The largest predicted peak that fits with this chance, 0 < chance < 1; the inverse of `chance_of_fitting`.

    The error is a factor, so each chance corresponds to a limit in bytes: whole / quantile(chance).

    Source: derived here; tested against draws.
    """
    return whole_bytes / spread.quantile(chance)


def spread_for(job: Job) -> Spread:
    """The part of the calibration that `spread_of` reads, which a plan stores so that it can be priced again."""
    engines, counters = (job.engine.name, None), ("device", "needed")
    memory = tuple(each for each in job.spread.memory if each.counter in counters and each.engine in engines)
    return job.spread.model_copy(update={"memory": memory})


def memory_limit_bytes(job: PoolJob, layout: Degrees) -> Number:
    """The largest predicted peak with which a layout fits, for one layout or many.

    The chance 1 - risk sets the limit, or the headroom if the user asks for one.

    Source: `largest_peak_bytes`.
    """
    return job.memory_share * _limit(job, layout, 1 - job.risk)


def most_peak_bytes(job: PoolJob, layout: Degrees) -> Number:
    """The largest predicted peak that may fit; above this peak a layout does not fit.

    If headroom is asked for, it sets this limit too.

    Source: `largest_peak_bytes`.
    """
    return _limit(job, layout, UNLIKELY)


def _limit(job: PoolJob, layout: Degrees, chance: float) -> Number:
    if job.headroom is not None:
        return job.whole_memory_bytes * (1 - job.headroom)
    return largest_peak_bytes(job.whole_memory_bytes, spread_of(job, layout), chance)
