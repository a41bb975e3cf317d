"""Whether a predicted peak of memory fits into a device: the chance, the verdict, and the limit that a chance sets.

The stages of a plan share their error: one program, one allocator and one fit of the same formulas are behind all of
them. Assumed: wholly, so that a plan fits when its worst stage does, and its chance is that of this stage. Were the
errors independent, the chance would be the product over the stages, which is less. Peaks of every stage of one run,
published for a few dozen runs, would settle how much of the error is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from planner.cost.memory_band import MemoryDistribution
    from planner.numbers import Number

Verdict = Literal["fits", "may not fit", "does not fit"]

RISK: Final = 0.05
"""A plan *fits* from a chance of 1 - RISK; `--risk` sets another."""
UNLIKELY: Final = 0.05
"""A plan *does not fit* below this chance, whatever the risk that is taken."""


def chance_of_fitting(peak_bytes: Number, whole_bytes: Number, spread: MemoryDistribution) -> Number:
    """Probability that a predicted peak stays within the whole memory that a program can have; broadcasts.

    spread: of measured over predicted bytes, in the counter of the device.

    Source: the definition; `MemoryDistribution` names that of the distribution.
    """
    return spread.chance(whole_bytes / np.asarray(peak_bytes, dtype=np.float64))


def largest_peak_bytes(whole_bytes: Number, spread: MemoryDistribution, chance: Number) -> Number:
    """The largest predicted peak that fits with this chance, 0 < chance < 1; the inverse of `chance_of_fitting`.

    The error is a factor, so that a chance is a limit in bytes: whole / quantile(chance).

    Source: derived here; tested against draws.
    """
    return whole_bytes / spread.quantile(chance)


def verdict_of(chance: float, risk: float = RISK) -> Verdict:
    """What a chance is called: *fits* from 1 - risk, *does not fit* below 5 %, else *may not fit*."""
    if chance >= 1 - risk:
        return "fits"
    return "may not fit" if chance >= UNLIKELY else "does not fit"
