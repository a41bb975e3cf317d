"""The keys of simplicity: whole numbers by which the planner picks the simplest of several nearly optimal layouts.

A smaller key is simpler, and a key decides only if all earlier keys are equal. Some keys belong to the configuration
itself (idle devices, interleave, axes). The other keys follow from the columns of a choice: the sum of recomputed
tenths, whether stages are even, and the risk of the worst stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.numbers import IntArray, Mask
    from planner.search.optimum.candidate import Candidate

RISKS: Final = (0.01, 0.05)
"""Upper limits of the classes of risk: the chance that a layout does not fit."""

INTERLEAVES: Final = (1, 4, 8)
"""Upper limits of the classes of interleave, which is the number of chunks per stage."""

TENTHS: Final = 10


class Simplicity(NamedTuple):
    """The keys of a layout, most important key first.

    idle: idle devices.
    recomputed: tenths of the layers' forward pass that are recomputed, rounded up.
    interleave: class of the chunks of a stage (`INTERLEAVES`).
    uneven: 1 unless all stages but the first and the last hold equally many layers, in equal chunks.
    axes: degrees above 1 of tp, pp, cp and ep.
    risk: class of the chance of not fitting (`RISKS`).
    """

    idle: int
    recomputed: int
    interleave: int
    uneven: int
    axes: int
    risk: int


def class_of(value: float, limits: Sequence[float]) -> int:
    """Index of the first limit that is at least the value; `len(limits)` if the value exceeds all limits."""
    return sum(value > limit for limit in limits)


def tenths_of(units: int, num_layers: int) -> int:
    """Tenths of a model, rounded up, from tenths of layers."""
    return -(-units // num_layers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rated:
    """A candidate with the keys of its configuration and the contributions of its columns to the other keys.

    risk: class of the chance that the stage does not fit, [columns].
    repeated: tenths of layers that the stage recomputes, rounded up, [columns].
    alike: whether the chunks of the stage are of one size, [columns].
    """

    candidate: Candidate
    idle: int
    interleave: int
    axes: int
    risk: IntArray
    repeated: IntArray
    alike: Mask

    def keep(self, columns: Mask | IntArray) -> Rated:
        """The rated candidate with only these columns."""
        return replace(
            self,
            candidate=self.candidate.keep(columns),
            risk=self.risk[columns],
            repeated=self.repeated[columns],
            alike=self.alike[columns],
        )

    @property
    def inner(self) -> Mask:
        """Columns of stages that are neither the first nor the last, [columns]."""
        stage = self.candidate.stage
        return np.asarray((stage > 0) & (stage < self.candidate.num_stages - 1))

    def simplicity(self, columns: Sequence[int]) -> Simplicity:
        """The keys of a choice."""
        chosen = np.asarray(columns)
        inner = chosen[1:-1]
        even = len(np.unique(self.candidate.layers[inner])) <= 1 and bool(np.all(self.alike[inner]))
        return Simplicity(
            risk=int(self.risk[chosen].max()),
            idle=self.idle,
            recomputed=tenths_of(int(self.repeated[chosen].sum()), self.candidate.num_layers),
            interleave=self.interleave,
            uneven=int(not even),
            axes=self.axes,
        )
