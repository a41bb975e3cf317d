"""Fit the shipped calibration, and measure its errors on held-out sources.

    python tools/calibrate.py RUNS.csv planner/calibration.json

The slowdown of compute relative to the roofline is a product of factors: for the precision class, the engine whose
layers run, the device, the kind of layers, and for their combinations. A penalty keeps the factors of combinations near
1, so they differ from 1 only where runs require it. A combination without measured runs has the factors of its parts (a
mixed model, as in Gelman and Hill 2007, chapter 12; the penalties are chosen to forecast whole sources best). Four
other causes of time have factors: the core of fused attention for each device, engine and kernel, the innermost link
and the links beyond it for all runs, and the host for layers with and without experts. No constant belongs to a single
model. The evidence for error bands comes from folds that hold whole sources out. Folds that hold whole families of
publishers out tell how much wider a band is where only one family ran an engine on a device.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from band_widths import one_family_of, spread_of
from memory_runs import memory_runs, memory_spreads

from planner.cost.band import axes_of, features_of
from planner.cost.limits import unpriced
from planner.evidence.compare.score import score, step_seconds
from planner.evidence.fit import calibration_text, regression
from planner.evidence.rows.jobs import Unsupported, job_of
from planner.evidence.rows.runs import read_runs
from planner.specs.calibration import Calibration, CalibrationEntry, Evidence, precision_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memory_runs import MemoryRun
    from numpy.typing import NDArray

    from planner.evidence.rows.jobs import Setup
    from planner.evidence.rows.runs import Run

UNFITTED_ENGINES: Final = ("megatron-2021", "megatron-2022")
"""Engines without a fitted factor, because all their runs are in sources that enter no fit (docs/decisions.md, 63)."""

_POINTS: Final = np.array([0.6, 1.0, 1.6, 2.6])
"""Values of a factor at which runs are priced; a slowdown is this many times `_USUAL_SLOWDOWN`."""

_USUAL_SLOWDOWN: Final = 1.2
"""The slowdown at which the other factors are priced: about the median over devices and engines."""

_FACTORS: Final = ("slowdown", "core_attention", "scale_up", "network", "host")
"""Fields of a calibration entry that the fit adjusts."""


class _Term(NamedTuple):
    """A group of factors: one for each combination of values that `keys` have in the samples.

    penalty: weight of a squared log factor, in runs.
    """

    factor: str
    keys: tuple[str, ...]
    penalty: float


_TERMS: Final = (
    _Term("slowdown", ("device", "layers", "precision", "experts"), 15.0),
    _Term("slowdown", ("device", "layers"), 9.0),
    _Term("core_attention", ("device", "engine", "attention_kernel"), 0.3),
    _Term("slowdown", ("device", "precision"), 9.0),
    _Term("slowdown", ("layers", "precision"), 9.0),
    _Term("slowdown", ("device", "experts"), 9.0),
    _Term("slowdown", ("device",), 6.0),
    _Term("slowdown", ("layers",), 6.0),
    _Term("slowdown", ("precision",), 6.0),
    _Term("slowdown", ("experts",), 6.0),
    _Term("host", ("experts",), 0.1),
    _Term("slowdown", (), 0.5),
    _Term("scale_up", (), 0.3),
    _Term("network", (), 0.3),
)
"""From the most to the least specific."""

_NOISE: Final = 0.05
"""Log errors above this are penalised by absolute value, not by square, because published runs have outliers."""

_LARGE: Final = math.log(1.05)
"""Log factors above this are corrections that a reader notices; plans name those that move the step by 5 %."""

_SWEEPS: Final = 40
_LARGEST_STEP: Final = 0.3
_CLOSE: Final = 1e-4
_LARGEST_LOG: Final = math.log(4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured run for the fit, with its step seconds as forecast at a few values of each calibration factor.

    seconds: shape (factors, points). At each point, only one factor differs from its usual value.
    layers: the engine whose layers run.
    kernel: the engine's kernel of fused attention.
    """

    run: str
    source: str
    family: str = ""
    fit: str = ""
    keys: dict[str, str | bool]
    axes: str
    features: tuple[str, ...] = ()
    measured_seconds: float
    seconds: NDArray[np.float64]
    layers: str = ""
    kernel: str = "latest"

    @property
    def kind(self) -> dict[str, Any]:
        """The keys by which the evidence of error bands is grouped."""
        return {**self.keys, "axes": self.axes, "features": self.features}

    def group(self, keys: Iterable[str]) -> tuple[str | bool, ...]:
        """The sample's values of these keys."""
        layers = self.layers or self.keys["engine"]
        return tuple({**self.keys, "layers": layers, "attention_kernel": self.kernel}[key] for key in keys)


_Group = tuple[_Term, tuple[str | bool, ...]]


class _Prices:
    """Step seconds of many samples, and their slopes, at any factors."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._seconds = np.array([sample.seconds for sample in samples])
        self._is_moved = np.array([sample.keys["engine"] not in UNFITTED_ENGINES for sample in samples])

    def at(self, logs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds, (samples,), and their slopes by each log factor, (samples, factors), at logs: (samples, factors).

        The seconds that one factor adds do not depend on the other factors, except that `slowdown` also multiplies the
        seconds that `core_attention` adds. Engines without a fitted factor have no slowdown, and all other factors are
        1.
        """
        unmoved = np.where(np.array(_FACTORS) == "slowdown", -math.log(_USUAL_SLOWDOWN), 0.0)
        factors = np.exp(np.where(self._is_moved[:, None], np.clip(logs, -_LARGEST_LOG, _LARGEST_LOG), unmoved))
        place = np.clip(np.searchsorted(_POINTS, factors) - 1, 0, len(_POINTS) - 2)[..., None]
        slopes = np.take_along_axis(np.diff(self._seconds) / np.diff(_POINTS), place, -1)[..., 0]
        start = np.take_along_axis(self._seconds, place, -1)[..., 0]
        usual = self._seconds[:, :1, _POINTS.tolist().index(1.0)]
        added = start + slopes * (factors - _POINTS[place[..., 0]]) - usual
        slow, core = (_FACTORS.index(name) for name in ("slowdown", "core_attention"))
        slopes[:, slow] += added[:, core]
        added[:, core] *= factors[:, slow]
        slopes[:, core] *= factors[:, slow]
        return usual[:, 0] + added.sum(axis=1), slopes * factors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """The log factor of every group in the fitted samples."""

    factors: dict[_Group, float]

    def predicted(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Step seconds of each run; a group without samples has the factor 1."""
        logs = np.zeros((len(samples), len(_FACTORS)))
        for term in _TERMS:
            column = _FACTORS.index(term.factor)
            logs[:, column] += [self.factors.get((term, sample.group(term.keys)), 0.0) for sample in samples]
        return _Prices(samples).at(logs)[0]


def read_samples(runs: Iterable[Run]) -> list[Sample]:
    """A sample for each run that can be priced and was measured."""
    samples = []
    for run in runs:
        setup = job_of(run)
        if run.measured_step_seconds is None or isinstance(setup, Unsupported) or unpriced(setup.job, setup.layout):
            continue
        samples.append(_sample(run, setup, run.measured_step_seconds))
    return samples


def _sample(run: Run, setup: Setup, measured_seconds: float) -> Sample:
    job = setup.job
    return Sample(
        run=run.id,
        source=run.source_set,
        family=run.family,
        fit=run.fit,
        keys={
            "device": job.cluster.device.name,
            "engine": job.engine.name,
            "precision": precision_class(job.training.precision),
            "experts": job.model.moe is not None,
        },
        layers=job.engine.compute.layers_of,
        kernel=job.engine.compute.attention_kernel,
        axes=axes_of(setup.layout),
        features=features_of(job, setup.layout),
        measured_seconds=measured_seconds,
        seconds=_seconds(setup),
    )


def _seconds(setup: Setup) -> NDArray[np.float64]:
    """Step seconds of a run at the points of each factor, (factors, points); all factors are 1 at one of them."""
    found = np.full((len(_FACTORS), len(_POINTS)), _seconds_at(setup, "slowdown", 1.0))
    for (row, name), (column, value) in itertools.product(enumerate(_FACTORS), enumerate(_POINTS)):
        if value != 1.0:
            found[row, column] = _seconds_at(setup, name, float(value))
    return found


def _seconds_at(setup: Setup, name: str, value: float) -> float:
    """Step seconds of a run with the usual slowdown and one factor multiplied by `value`."""
    factors = {"slowdown": _USUAL_SLOWDOWN}
    factors[name] = factors.get(name, 1.0) * value
    return step_seconds(replace(setup, job=replace(setup.job, calibration=CalibrationEntry.model_validate(factors))))


def _fitted(samples: Iterable[Sample]) -> list[Sample]:
    return [s for s in samples if not s.fit and s.keys["engine"] not in UNFITTED_ENGINES]


def _fit(samples: Sequence[Sample]) -> _Fit:
    """Factors of least penalised |log(measured / predicted)|, by reweighted least squares.

    A penalty is the precision of a prior in the regression from which a user's corrections come, too.

    Source: Huber (1964) for the weights; Gauss-Newton.
    """
    used = _fitted(samples)
    if not used:
        return _Fit(factors={})
    groups: dict[_Group, int] = {}
    for term in _TERMS:
        for sample in used:
            groups.setdefault((term, sample.group(term.keys)), len(groups))
    designs = np.zeros((len(_FACTORS), len(used), len(groups)))
    for (term, group), column in groups.items():
        designs[_FACTORS.index(term.factor), [sample.group(term.keys) == group for sample in used], column] = 1.0
    penalty = np.array([term.penalty for term, _ in groups])
    measured, prices = np.log([sample.measured_seconds for sample in used]), _Prices(used)
    logs = np.zeros(len(groups))
    for _ in range(_SWEEPS):
        predicted, slopes = prices.at((designs @ logs).T)
        error = measured - np.log(predicted)
        weight = _NOISE / np.maximum(np.abs(error), _NOISE)
        gradient = np.einsum("fsg,sf->sg", designs, slopes / predicted[:, None])
        step = regression(gradient, error + gradient @ logs, penalty, weight)[0] - logs
        logs = logs + np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)
        if np.abs(step).max() < _CLOSE:
            break
    return _Fit(factors={group: float(logs[column]) for group, column in groups.items()})


def fits_without(samples: Sequence[Sample], folds: Sequence[int]) -> dict[int, _Fit]:
    """For each fold, the fit of all samples outside it."""
    return {fold: _fit([s for s, own in zip(samples, folds, strict=True) if own != fold]) for fold in set(folds)}


def held_out_ratios(
    samples: Sequence[Sample], folds: Sequence[int], fits: Mapping[int, _Fit] | None = None
) -> NDArray[np.float64]:
    """Measured over predicted seconds of each sample, from a fit without its fold; shape (samples,)."""
    ratios = np.empty(len(samples))
    for fold, fit in (fits or fits_without(samples, folds)).items():
        held = [s for s, own in zip(samples, folds, strict=True) if own == fold]
        ratios[np.array(folds) == fold] = _ratios(fit, held)
    return ratios


def fitted_ratios(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Measured over predicted seconds of each sample, by a fit of all samples (in-sample); shape (samples,)."""
    return _ratios(_fit(samples), samples)


def _ratios(fit: _Fit, samples: Sequence[Sample]) -> NDArray[np.float64]:
    return np.array([sample.measured_seconds for sample in samples]) / fit.predicted(samples)


def calibrate(samples: Sequence[Sample], memory: Sequence[MemoryRun] = ()) -> Calibration:
    """The calibration of all samples, with evidence from folds that hold whole sources out."""
    fit, fitted, folds = _fit(samples), _fitted(samples), family_folds(samples)
    fits = fits_without(samples, folds)
    without = {sample.family or sample.source: fits[fold] for sample, fold in zip(samples, folds, strict=True)}
    entries = [CalibrationEntry.model_validate({"engine": name, "alone": True}) for name in UNFITTED_ENGINES]
    for keys in dict.fromkeys(term.keys for term in _TERMS):
        groups: dict[tuple[str | bool, ...], dict[str, float]] = defaultdict(dict)
        for (term, group), log in fit.factors.items():
            if term.keys == keys:
                usual = _USUAL_SLOWDOWN if term.factor == "slowdown" and not keys else 1.0
                groups[group][term.factor] = round(usual * math.exp(log), 4)
        for group in sorted(groups, key=str):
            members = [s for s in fitted if s.group(keys) == group] if keys else []
            sources = tuple(sorted({s.source for s in members}))
            named = dict(zip(keys, group, strict=True))
            of_group = {**named, **groups[group], "num_rows": len(members), "sources": sources}
            if keys in (("device", "layers"), ("device", "engine", "attention_kernel"), ("layers",)):
                of_group["family"] = _rests_on(named, fit, without)
            entries.append(CalibrationEntry.model_validate(of_group))
    evidence = evidence_of(samples, held_out_ratios(samples, source_folds(samples)))
    held, spread = evidence_of(samples, held_out_ratios(samples, folds, fits)), spread_of(evidence)
    one_family = one_family_of(evidence, held, spread)
    spread = spread.model_copy(update={"one_family": one_family, "memory": memory_spreads(memory)})
    return Calibration(entries=tuple(entries), evidence=evidence, spread=spread)


def _rests_on(named: Mapping[str, str | bool], fit: _Fit, without: Mapping[str, _Fit]) -> str:
    """The family of publishers without which less than half of an engine's correction is left; empty without one.

    named: the engine, and the device if the correction is of one device.
    """

    def corrections(found: _Fit) -> NDArray[np.float64]:
        logs = np.zeros(len(_FACTORS))
        for term in _TERMS:
            if {"engine", "layers"} & set(term.keys) and set(term.keys) <= set(named):
                group = (term, tuple(named[key] for key in term.keys))
                logs[_FACTORS.index(term.factor)] += found.factors.get(group, 0.0)
        return logs

    own = corrections(fit)
    large = np.abs(own) > _LARGE
    left = {family: np.min(corrections(each)[large] / own[large], initial=1.0) for family, each in without.items()}
    family = min(left, key=lambda each: float(left[each]))
    return family if left[family] < 0.5 else ""


def source_folds(samples: Iterable[Sample]) -> list[int]:
    """The fold of each sample; each source is one fold."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(sample.source, len(numbers)) for sample in samples]


def family_folds(samples: Iterable[Sample]) -> list[int]:
    """The fold of each sample; each family of publishers is one fold."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(sample.family or sample.source, len(numbers)) for sample in samples]


def evidence_of(samples: Sequence[Sample], ratios: NDArray[np.float64]) -> tuple[Evidence, ...]:
    """Sorted held-out ratios of each kind of run in each source from which bands may learn."""
    kinds = defaultdict(list)
    for sample, ratio in zip(samples, ratios, strict=True):
        if sample.fit == "no":
            continue
        family = sample.family or sample.source
        kinds[sample.source, family, tuple(sample.kind.items())].append(round(float(ratio), 4))
    return tuple(
        Evidence.model_validate({"source": source, "family": family, **dict(keys), "ratios": tuple(sorted(own))})
        for (source, family, keys), own in sorted(kinds.items(), key=str)
    )


def main(arguments: Sequence[str]) -> None:
    """Fit RUNS.csv and write the calibration file."""
    runs, output = arguments
    table = [run for run in read_runs(Path(runs)) if run.fit != "no"]
    found = calibrate(read_samples(table), memory_runs(map(score, table)))
    Path(output).write_text(calibration_text(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
