"""Error band of a forecast, derived from the forecast errors of published runs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

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

_NINTH: Final = math.log(9)  # the logit of 0.9
FRAMEWORK: Final = "unknown framework"
"""Feature of a run whose training program has no engine profile.

No published run has this feature, because two programs without profiles are never taken to be the same.
"""
KEYS: Final = ("device", "engine", "precision", "experts", "axes", "features")


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
    differ: int = sum(getattr(each, key) != keys[key] for key in KEYS if key in keys)
    return float(_UNLIKE**differ)
