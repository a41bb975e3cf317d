"""Error band of a forecast, derived from the forecast errors of published runs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from planner import elementary
from planner.cost.goodput import kept_share
from planner.cost.run import billed_devices, devices_in_use, longest_step_seconds, most_device_seconds
from planner.specs.calibration import Spread, precision_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from planner.layout import Degrees, Layout
    from planner.specs.calibration import Evidence
    from planner.specs.job import Job

_UNLIKE: Final = 0.6
"""Factor on the weight of a published run, for each property in which it differs from the forecast run.

The properties are device, engine, precision, experts, axes and features. The value is assumed: with whole sources held
out, values from 0.2 to 0.7 give about equally wide bands at equal coverage.
"""

_INSIDE: Final = 0.8
_MOST: Final = 20.0
"""When the factors that widen bands are chosen, a source counts as at most this many runs.

The values 1, 5 and 20 were tried with whole sources held out. With these values the median bands are 1.68, 1.64 and
1.60 wide, and hold 83, 79 and 80 % of a source's runs.
"""
_NINTH: Final = math.log(9)  # the logit of 0.9
_TAILS: Final = (0.5, 3.0)
_UNSEEN: Final = (1.0, 4.0)
FRAMEWORK: Final = "unknown framework"
"""Feature of a run whose training program has no engine profile.

No published run has this feature, because two programs without profiles are never taken to be the same.
"""
_KEYS: Final = ("device", "engine", "precision", "experts", "axes", "features")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Range of step times: 8 of 10 runs like this one take between `low` and `high` times the forecast.

    num_near: number of published runs with the same device, engine, precision, experts, axes and features; or number
        of the user's own runs on the device with the engine, if their calibration states the band.
    unseen: properties of this run that no published run has; they make the band wider.
    axes: the layout's axes, as in `axes_of`.
    family: the family of publishers on which the engine's corrections rest (`only_family`); it makes the band wider.
    """

    low: float
    high: float
    num_near: int = 0
    unseen: tuple[str, ...] = ()
    axes: str = ""
    family: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    """Distribution of the ratio measured / predicted, for runs like a given one.

    logs: logarithms of the ratios of published runs, ascending.
    levels: weighted share of the runs below each logarithm; ascending, between 0 and 1.
    tails: factor on the logit of a level, for runs from a source that has no published runs; a factor above 1 moves
    levels away from one half and so widens the band.
    wider: factor on the distance to the median, for a kind of run that nobody has published.
    """

    logs: NDArray[np.float64]
    levels: NDArray[np.float64]
    tails: float = 1.0
    wider: float = 1.0

    def quantile(self, level: float) -> float:
        """The ratio that a run does not exceed with this probability, 0 < level < 1; at most the largest error seen."""
        middle = float(np.interp(0.5, self.levels, self.logs))
        logit = math.log(level / (1 - level))
        log = float(np.interp(1 / (1 + math.exp(-self.tails * logit)), self.levels, self.logs))
        return math.exp(middle + self.wider * (log - middle))

    def chance(self, ratio: float) -> float:
        """Probability that a run's ratio is at most `ratio`; the inverse of `quantile`."""
        middle = float(np.interp(0.5, self.levels, self.logs))
        log = middle + (math.log(ratio) - middle) / self.wider
        level = float(np.interp(log, self.logs, self.levels, left=0.0, right=1.0))
        if not 0 < level < 1:
            return level
        return 1 / (1 + math.exp(-math.log(level / (1 - level)) / self.tails))


def axes_of(layout: Layout) -> str:
    """Names of the axes that divide the work: `tp+pp`, or `ep+fsdp` under ZeRO-2 and 3; `dp` if there are none."""
    names = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) > 1]
    if layout.zero >= 2 and layout.dp * layout.cp > 1:
        names.append("fsdp")
    return "+".join(names) or "dp"


def features_of(job: Job, layout: Degrees) -> tuple[str, ...]:
    """Features that distinguish a run from plain training of all weights without offload, in a fixed order."""
    training = job.training
    found = {
        "adapters": training.lora_rank > 0,
        "quantised weights": training.lora_rank > 0 and training.frozen_weights != "16-bit",
        training.objective: training.objective != "next-token",
        "offload": layout.offload != "none",
        FRAMEWORK: bool(job.engine.stands_for),
    }
    return tuple(name for name, is_there in found.items() if is_there)


def kinds_of(job: Job, layout: Layout) -> tuple[str, ...]:
    """Kinds of work that a run has: its precision, its layers, its axes and its features."""
    precision = precision_class(job.training.precision)
    layers = "dense layers" if job.model.moe is None else "experts"
    bits = "16 bits" if precision == "16" else precision
    return (bits, layers, *axes_of(layout).split("+"), *features_of(job, layout))


def _wider(num_unseen: int, spread: Spread) -> float:
    """Factor on the log width of a band for a run with `num_unseen` properties that no known run has."""
    return math.sqrt(1 + num_unseen * (spread.unseen**2 - 1))


def band(job: Job, layout: Layout) -> Band | None:
    """The error band of a forecast; None for a CPU, for a mixed cluster, and without evidence.

    No published runs are known for CPUs and mixed clusters. If the user's own calibration states quantiles, these
    quantiles are the band, wider for kinds of work that the user's runs did not have.
    """
    if len(job.pools) > 1:
        return None
    (pool,) = job.pools
    own = pool.calibration
    if own.low and own.high:
        unseen = tuple(kind for kind in kinds_of(job, layout) if own.kinds and kind not in own.kinds)
        low, high = (quantile ** _wider(len(unseen), job.spread) for quantile in (own.low, own.high))
        return Band(low=low, high=high, num_near=own.num_rows, unseen=unseen, axes=axes_of(layout))
    if not job.evidence or pool.cluster.device.kind == "cpu":
        return None
    return band_of(job.evidence, job.spread, **_keys(job, layout))


def time_distribution(job: Job, layout: Layout) -> Distribution | None:
    """Distribution of measured / predicted step time; None if `band` is None.

    Its quantiles at 10 % and 90 % are those of `band`.
    """
    found = band(job, layout)
    if found is None:
        return None
    own = job.pools[0].calibration
    if own.low and own.high:  # a logistic distribution through the two quantiles of the band
        levels = np.linspace(0.01, 0.99, 99)
        middle, half = math.log(found.low * found.high) / 2, math.log(found.high / found.low) / 2
        return Distribution(logs=middle + half / _NINTH * elementary.log(levels / (1 - levels)), levels=levels)
    return distribution_of(job.evidence, job.spread, num_unseen=len(found.unseen), **_keys(job, layout))


def chance_of_deadline(job: Job, layout: Layout, step_seconds: float) -> float | None:
    """Chance that the whole run meets its deadline; None without a deadline or a distribution of step times.

    Source: `distribution_of`.
    """
    return _chance(job, layout, longest_step_seconds(job.training) / step_seconds)


def chance_of_budget(job: Job, layout: Layout, step_seconds: float) -> float | None:
    """Chance that the whole run costs no more than its budget; None without a budget or a distribution of step times.

    Source: `distribution_of`; the cost is proportional to the time.
    """
    most = most_device_seconds(job.cluster, job.training)
    return _chance(job, layout, most / billed_devices(job.cluster, job.training, layout) / step_seconds)


def _chance(job: Job, layout: Layout, longest: float) -> float | None:
    """Chance that steps take at most `longest` times the forecast, for a run without failures."""
    found = time_distribution(job, layout) if math.isfinite(longest) else None
    return found.chance(longest * kept_share(job, devices_in_use(job.cluster, layout))) if found else None


def _keys(job: Job, layout: Layout) -> dict[str, Any]:
    return {
        "device": job.pools[0].cluster.device.name,
        "engine": job.engine.name,
        "precision": precision_class(job.training.precision),
        "experts": job.model.moe is not None,
        "axes": axes_of(layout),
        "features": features_of(job, layout),
        "family": job.pools[0].calibration.family,
    }


def band_of(evidence: Iterable[Evidence], spread: Spread | None = None, **keys: Any) -> Band:
    """The band computed from the errors of held-out runs.

    A run weighs more if it shares more properties with `keys`.
    """
    evidence = tuple(evidence)
    unseen = unseen_of(evidence, **keys)
    found = distribution_of(evidence, spread or Spread(), num_unseen=len(unseen), **keys)
    near = [each for each in evidence if _likeness(each, keys) == 1]
    return Band(
        low=min(found.quantile(0.1), 1.0),
        high=max(found.quantile(0.9), 1.0),
        num_near=sum(len(each.ratios) for each in near),
        unseen=unseen,
        axes=keys["axes"],
        family=only_family(evidence, **keys),
    )


def only_family(evidence: Sequence[Evidence], *, device: str, engine: str, family: str = "", **_: Any) -> str:
    """The family of publishers on which the engine's corrections rest; empty if they rest on several.

    It is the family that the calibration names, or the only one that published runs of the engine on the device. The
    engine's runs on other devices count if nobody published runs on this device: corrections come from them then.
    """
    if family:
        return family
    own = [each for each in evidence if each.engine == engine]
    found = {each.family for each in own if each.device == device} or {each.family for each in own}
    return found.pop() if len(found) == 1 else ""


def unseen_of(evidence: Iterable[Evidence], **keys: Any) -> tuple[str, ...]:
    """Properties in `keys` that no run of the evidence has.

    The properties are the device, the engine, the axes and each feature. If device and engine are known, the properties
    also include the precision and the kind of layers (experts), each in combination with this device and engine.
    """
    evidence = tuple(evidence)
    alone = ("device", "engine", "axes")
    found = [key for key in alone if all(getattr(each, key) != keys[key] for each in evidence)]
    if not {"device", "engine"} & set(found):
        for key in ("precision", "experts"):
            together = ("device", "engine", key)
            if not any(all(getattr(each, name) == keys[name] for name in together) for each in evidence):
                found.append(key)
    known = {feature for each in evidence for feature in each.features} - {FRAMEWORK}
    return (*found, *(feature for feature in keys.get("features", ()) if feature not in known))


def distribution_of(evidence: Sequence[Evidence], spread: Spread, *, num_unseen: int = 0, **keys: Any) -> Distribution:
    """Distribution for runs like `keys`: sources have equal total weights, and runs are weighted by their likeness.

    num_unseen: number of properties that no run of the evidence has; each adds to the variance.

    Source: weighted quantiles of log(measured / predicted); conformal prediction with weights for likeness (Tibshirani
    et al., NeurIPS 2019), by clusters (Dunn, Wasserman and Ramdas, JASA 2023).
    """
    logs = elementary.log(np.concatenate([each.ratios for each in evidence]))
    order = np.argsort(logs, kind="stable")
    weights = _weights(evidence, keys)[order]
    levels = (np.cumsum(weights) - weights / 2) / weights.sum()
    wider = _wider(num_unseen, spread) * (spread.one_family if only_family(evidence, **keys) else 1.0)
    return Distribution(logs=logs[order], levels=levels, tails=spread.tails, wider=wider)


def _weights(evidence: Sequence[Evidence], keys: dict[str, Any]) -> NDArray[np.float64]:
    """Weight of each ratio: likeness divided by the number of runs of its source."""
    sizes: dict[str, int] = defaultdict(int)
    for each in evidence:
        sizes[each.source] += len(each.ratios)
    own = [_likeness(each, keys) / sizes[each.source] for each in evidence]
    return np.repeat(own, [len(each.ratios) for each in evidence])


def _likeness(each: Evidence, keys: dict[str, Any]) -> float:
    differ: int = sum(getattr(each, key) != keys[key] for key in _KEYS if key in keys)
    return float(_UNLIKE**differ)


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
            keys = {key: getattr(each, key) for key in _KEYS}
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
        keys = {key: getattr(each, key) for key in _KEYS}
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
