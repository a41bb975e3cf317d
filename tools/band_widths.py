"""Choose the factors of the calibration that widen error bands (planner/cost/band.py), from held-out forecasts.

The planner reads these factors; only the fit of the shipped calibration, and the page of accuracy, choose them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from planner.cost.band import KEYS, Distribution, distribution_of, only_family, unseen_of
from planner.specs.calibration import Spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from planner.specs.calibration import Evidence

_INSIDE: Final = 0.8
_MOST: Final = 20.0
"""When the factors that widen bands are chosen, a source counts as at most this many runs.

The values 1, 5 and 20 were tried with whole sources held out. With these values the median bands are 1.68, 1.64 and
1.60 wide, and hold 83, 79 and 80 % of a source's runs.
"""
_NINTH: Final = math.log(9)  # the logit of 0.9
_TAILS: Final = (0.5, 3.0)
_UNSEEN: Final = (1.0, 4.0)


class _Miss(NamedTuple):
    source: str
    distribution: Distribution  # before `tails` is applied
    log: float
    is_unseen: bool


def spread_of(evidence: Sequence[Evidence]) -> Spread:
    """Factors by which bands are widened for a new source and for a new kind of run, fitted to the evidence.

    The runs of each source are forecast from the evidence of the other sources. `tails` is chosen for runs whose kind
    also occurs in other sources: 8 of 10 of them must lie between the 10 % and the 90 % quantiles. `unseen` is chosen
    so that 8 of 10 runs of all other kinds lie between these quantiles. All sources with many runs have equal weight,
    and sources with few runs have less. A factor without evidence keeps its default.

    Source: split conformal prediction (Lei et al., JASA 2018), here with sources as folds.
    """
    misses = []
    for source in dict.fromkeys(each.source for each in evidence):
        others = [each for each in evidence if each.source != source]
        for each in [each for each in evidence if each.source == source and others]:
            keys = {key: getattr(each, key) for key in KEYS}
            found = distribution_of(others, Spread(tails=1.0), **keys)
            is_unseen = bool(unseen_of(others, **keys))
            misses += [_Miss(source, found, math.log(ratio), is_unseen) for ratio in each.ratios]
    spread = Spread()
    known, unknown = ([miss for miss in misses if miss.is_unseen == unseen] for unseen in (False, True))
    if known:
        spread = Spread(tails=_clipped(_enough([_tails(miss) for miss in known], known), _TAILS), unseen=spread.unseen)
    if unknown:
        widths = [_width(miss, spread.tails) for miss in unknown]
        spread = Spread(tails=spread.tails, unseen=_clipped(_enough(widths, unknown), _UNSEEN))
    return spread


def one_family_of(evidence: Sequence[Evidence], held: Iterable[Evidence], spread: Spread) -> float:
    """The factor that widens a band where one family of publishers alone ran the engine on the device.

    The evidence without a family leaves one other family for some of its runs. The factor is chosen so that the bands
    from this evidence hold 8 of 10 of these runs. Families have equal weight, as sources have in `spread_of`.
    held: runs forecast by fits without their whole family; `spread`: without this factor.

    Source: as `spread_of`, with families as folds.
    """
    misses = []
    for each in held:
        others = [other for other in evidence if other.family != each.family]
        keys = {key: getattr(each, key) for key in KEYS}
        if only_family(others, **keys):
            found = distribution_of(others, spread, num_unseen=len(unseen_of(others, **keys)), **keys)
            misses += [_Miss(each.family, found, math.log(ratio), True) for ratio in each.ratios]
    return _clipped(_enough([_width(miss, spread.tails) for miss in misses], misses), _UNSEEN) if misses else 1.0


def _clipped(value: float, ends: tuple[float, float]) -> float:
    return round(min(max(value, ends[0]), ends[1]), 3)


def _enough(values: Sequence[float], misses: Sequence[_Miss]) -> float:
    """The smallest value that suffices for 8 of 10 held-out runs; a source counts as at most `_MOST` runs."""
    sizes: dict[str, int] = defaultdict(int)
    for miss in misses:
        sizes[miss.source] += 1
    order = np.argsort(values)
    weights = np.array([min(1.0, _MOST / sizes[miss.source]) for miss in misses])[order]
    return float(np.array(values)[order][np.searchsorted(np.cumsum(weights) / weights.sum(), _INSIDE)])


def _tails(miss: _Miss) -> float:
    """The value of `tails` that puts a held-out run on the edge of its band; infinite if no band is wide enough."""
    level = float(np.interp(miss.log, miss.distribution.logs, miss.distribution.levels, left=0.0, right=1.0))
    return abs(math.log(level / (1 - level))) / _NINTH if 0 < level < 1 else math.inf


def _width(miss: _Miss, tails: float) -> float:
    """The factor on the width of the band that puts a held-out run on the band's edge."""
    found = replace(miss.distribution, tails=tails)
    middle = math.log(found.quantile(0.5))
    edge = math.log(found.quantile(0.9 if miss.log > middle else 0.1))
    return (miss.log - middle) / (edge - middle) if edge != middle else math.inf
