"""Whether a predicted peak of memory fits into a device: the chance, the verdict, and the limit for a given chance.

The forecast errors of a plan's stages are assumed to be equal, because all stages run one program with one allocator
and are predicted by the same formulas. A plan therefore fits if its worst stage fits, and the plan's chance is the
worst stage's chance. For independent errors the chance would be smaller, namely the product over the stages. This
assumption has not been tested, although the peaks of every stage have been published for a few dozen runs.
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
"""A plan with a lower chance than this *does not fit*, whatever risk is accepted. From 1 - risk upwards it *fits*."""

_UNKNOWN: Final = MemoryDistribution(location=0.0, scale=0.1)
"""Distribution for a calibration without any measured peaks: 8 of 10 peaks within 17 %.

The value is assumed; the user's own runs replace it.
"""


def spread_of(job: Job, layout: Degrees) -> MemoryDistribution:
    """Distribution of the ratio measured / predicted bytes of a device, for one layout or many."""
    return memory_distribution(job, layout) or _UNKNOWN


def chance_of_fitting(peak_bytes: Number, whole_bytes: Number, spread: MemoryDistribution) -> Number:
    """Probability that the true peak of a run with this predicted peak stays within the memory of its device.

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
    """The part of the calibration that `spread_of` reads; a plan stores it for later pricing."""
    engines, counters = (job.engine.name, None), ("device", "needed")
    memory = tuple(each for each in job.spread.memory if each.counter in counters and each.engine in engines)
    return job.spread.model_copy(update={"memory": memory})


def memory_limit_bytes(job: PoolJob, layout: Degrees, *, of_host: bool = False) -> Number:
    """The largest predicted peak at which a layout still fits, for one layout or many.

    If the user asks for headroom, the headroom sets the limit. Otherwise the chance of fitting, 1 - risk, sets the
    limit.

    of_host: whether to return the limit of a device's share of its host. The ledger of the host is assumed to have the
        error of the device's: no peak of a host is among the published runs.

    Source: `largest_peak_bytes`.
    """
    return (1.0 if of_host else job.memory_share) * _limit(job, layout, 1 - job.risk, of_host)


def most_peak_bytes(job: PoolJob, layout: Degrees, *, of_host: bool = False) -> Number:
    """The largest predicted peak at which a layout still *may fit*; above it the layout *does not fit*.

    If the user asked for headroom, it sets this limit too.

    of_host: as in `memory_limit_bytes`.

    Source: `largest_peak_bytes`.
    """
    return _limit(job, layout, UNLIKELY, of_host)


def _limit(job: PoolJob, layout: Degrees, chance: float, of_host: bool) -> Number:
    whole = job.host_memory_bytes if of_host else job.whole_memory_bytes
    if job.headroom is not None:
        return whole * (1 - job.headroom)
    return largest_peak_bytes(whole, spread_of(job, layout), chance)
