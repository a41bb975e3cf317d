"""Error of a forecast of peak memory: the distribution of measured / predicted bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cost.band import features_of
from planner.elementary import arccos, cos, exp, log

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from planner.layout import Degrees
    from planner.numbers import Number
    from planner.specs.calibration import Counter
    from planner.specs.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDistribution:
    """Distribution of log(measured / predicted bytes): Student's t with 4 degrees of freedom.

    location, scale: parameters of the distribution, as numbers for one layout or arrays for many.
    """

    location: Number
    scale: Number

    def quantile(self, level: Number) -> Number:
        """The ratio that a run's peak does not exceed with this probability, 0 < level < 1; broadcasts.

        Source: Shaw, Sampling Student's t distribution (Journal of Computational Finance, 2006), for 4 degrees.
        """
        root = np.sqrt(4 * level * (1 - level))
        value = 2 * np.sqrt(np.maximum(cos(arccos(np.minimum(root, 1.0)) / 3) / root - 1, 0.0))
        return exp(self.location + self.scale * np.copysign(value, level - 0.5))

    def chance(self, ratio: Number) -> Number:
        """Probability that the peak is at most `ratio` times the predicted peak; the inverse of `quantile`."""
        return t_below((log(ratio) - self.location) / self.scale)[()]


def t_below(value: Any) -> NDArray[np.float64]:
    """Distribution function of Student's t with 4 degrees of freedom; any shape.

    Source: Shaw, Sampling Student's t distribution (Journal of Computational Finance, 2006).
    """
    square = 1 + np.asarray(value, dtype=np.float64) ** 2 / 4
    share = value / np.sqrt(square)
    return np.asarray(0.5 + 0.375 * share * (1 - (square - 1) / square / 3))


def memory_distribution(job: Job, layout: Degrees, counter: Counter = "needed") -> MemoryDistribution | None:
    """Distribution of measured / predicted bytes on the device with the largest peak, for the given counter.

    The counter `needed` decides whether a run fits: B bytes suffice with probability `memory_distribution(job,
    layout).chance(B / predicted)`. Quantised weights, offload and an unknown framework widen the distribution, because
    no run of the fit has them. Adapters do not: peaks of two families of publishers, which are in no fit, lie within it
    (decision 212). The result is None if the calibration has no measured peaks. An older calibration file without the
    counter `needed` uses the counter `device`.
    """
    known = {(each.counter, each.engine): each for each in job.spread.memory}
    if (counter, None) not in known and counter == "needed":
        counter = "device"
    own = None if job.engine.stands_for else job.engine.name
    found = known.get((counter, own)) or known.get((counter, None))
    if found is None:
        return None
    unseen = set(features_of(job, layout)) - {"adapters"}
    wider = math.sqrt(1 + len(unseen) * (job.spread.unseen**2 - 1))
    return MemoryDistribution(location=found.location, scale=found.scale * wider)
