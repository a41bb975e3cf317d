"""What runs of one's own say about the corrections: a fit that holds to the shipped calibration until runs speak.

A device and an engine get one factor on the slowdown of computing. It minimises the squared log errors of the runs,
each over the spread that runs of one cluster have about their forecast, plus the squared log factor over the spread
that clusters have about each other. Few runs therefore move little, and many move all the way.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.estimate import estimate
from planner.errors import InputError
from planner.specs.by_name import shipped_calibration
from planner.specs.calibration import Calibration, CalibrationEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.layout import Layout
    from planner.specs.job import PoolJob

BETWEEN: Final = 0.12
WITHIN: Final = 0.12
"""Spreads, as standard deviations of log(measured / forecast): of clusters about each other, and of runs of one cluster
about its mean."""

_OUTLIER: Final = 2.0
"""Errors of more than so many spreads count by their absolute value, not their square."""

_TENTH: Final = 1.2816
"""The normal distribution leaves a tenth beyond so many standard deviations."""

_FACTORS: Final = (0.02, 50.0)
_SWEEPS: Final = 8
_STEP: Final = 1.02
_CLOSE: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A run that was measured, with the job and the layout that price it by the shipped calibration.

    where: the file, and the line of a table, for people. share: of the priced step that the run's step is.
    """

    where: str
    job: PoolJob
    layout: Layout
    measured_seconds: float
    share: float = 1.0

    @property
    def source(self) -> str:
        """The name of the file or folder."""
        return PurePath(re.sub(r":[0-9]+$", "", self.where)).name

    @property
    def kind(self) -> tuple[str, str]:
        """The device and the engine: what a correction is learnt for."""
        return self.job.cluster.device.name, self.job.engine.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Step seconds of one run: measured, and forecast before, after, and after learning from the other runs alone."""

    where: str
    measured: float
    before: float
    after: float
    left_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The correction of one device and engine, and what it does to each of the runs that it was learnt from."""

    device: str
    engine: str
    entry: CalibrationEntry
    forecasts: tuple[Forecasts, ...]


def learn(observations: Sequence[Observation]) -> tuple[Learnt, ...]:
    """A correction for each device and engine that has runs, in the order of the first run of each.

    Raises:
        InputError: there is no run.
    """
    if not observations:
        raise InputError("no run is left to learn from", hint="give a run that was measured")
    kinds: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for each in observations:
        kinds[each.kind].append(each)
    return tuple(_learn_kind(device, engine, own) for (device, engine), own in kinds.items())


def with_learnt(shipped: Calibration, learnt: Sequence[Learnt]) -> Calibration:
    """The shipped calibration with what was learnt before it, so that it is found first and multiplies the rest."""
    return shipped.model_copy(update={"entries": (*(each.entry for each in learnt), *shipped.entries)})


def learn_calibration(observations: Sequence[Observation]) -> tuple[Calibration, tuple[Learnt, ...]]:
    """The shipped calibration with what the runs add to it, and that alone.

    Raises:
        InputError: there is no run.
    """
    learnt = learn(observations)
    return with_learnt(shipped_calibration(), learnt), learnt


def _learn_kind(device: str, engine: str, runs: Sequence[Observation]) -> Learnt:
    measured = np.log([run.measured_seconds for run in runs])
    before = _log_seconds(runs, np.zeros(1))
    fit = _fit(runs, measured)
    left_out = [_without(fit, index) for index in range(len(runs))]
    entry = CalibrationEntry(
        device=device,
        engine=engine,
        slowdown=round(math.exp(float(fit.factor[0])), 4),
        low=round(math.exp(-_TENTH * fit.spread), 4),
        high=round(math.exp(_TENTH * fit.spread), 4),
        num_rows=len(runs),
        sources=tuple(dict.fromkeys(run.source for run in runs)),
    )
    found = zip(runs, np.exp(measured), np.exp(before), np.exp(fit.predicted), np.exp(left_out), strict=True)
    return Learnt(
        device=device,
        engine=engine,
        entry=entry,
        forecasts=tuple(
            Forecasts(where=run.where, measured=float(a), before=float(b), after=float(c), left_out=float(d))
            for run, a, b, c, d in found
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """Where the fit ended.

    factor: logarithms of the factors, (factors,). predicted, error, weight: of each run the log forecast, the log
    error, and the weight of its square, (runs,). slope: growth of the log forecast with the log factors, of each run,
    (runs, factors).
    """

    factor: NDArray[np.float64]
    predicted: NDArray[np.float64]
    error: NDArray[np.float64]
    weight: NDArray[np.float64]
    slope: NDArray[np.float64]

    @property
    def precision(self) -> NDArray[np.float64]:
        """Inverse covariance of the log factors."""
        return self.slope.T @ (self.slope * self.weight[:, None]) + np.eye(len(self.factor)) / BETWEEN**2

    @property
    def spread(self) -> float:
        """Standard deviation of the log error of a run to come, one like the mean of these."""
        variance = [row @ np.linalg.solve(self.precision, row) for row in self.slope]
        return math.sqrt(WITHIN**2 + float(np.mean(variance)))


def _fit(runs: Sequence[Observation], measured: NDArray[np.float64]) -> _Fit:
    """The log factors of least penalised error.

    Source: Gauss-Newton with Huber's weights (1964); the penalty is the prior of an empirical Bayes estimate (Efron and
    Morris, JASA 1973).
    """
    factor = np.zeros(1)
    for _ in range(_SWEEPS):
        predicted = _log_seconds(runs, factor)
        slope = (_log_seconds(runs, factor + math.log(_STEP)) - predicted)[:, None] / math.log(_STEP)
        error = measured - predicted
        weight = 1 / (WITHIN**2 * np.maximum(1.0, np.abs(error) / (_OUTLIER * WITHIN)))
        fit = _Fit(factor=factor, predicted=predicted, error=error, weight=weight, slope=slope)
        step = np.linalg.solve(fit.precision, slope.T @ (weight * error) - factor / BETWEEN**2)
        if float(np.abs(step).max()) < _CLOSE:
            break
        factor = np.clip(factor + step, *np.log(_FACTORS))
    return fit


def _without(fit: _Fit, index: int) -> float:
    """The logarithm of the forecast of one run by a fit of the others, linear about the fit of all."""
    weight = fit.weight.copy()
    weight[index] = 0.0
    others = replace(fit, weight=weight)
    step = np.linalg.solve(others.precision, fit.slope.T @ (weight * fit.error) - fit.factor / BETWEEN**2)
    return float(fit.predicted[index] + fit.slope[index] @ step)


def _log_seconds(runs: Sequence[Observation], factor: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([math.log(_corrected_seconds(run, factor)) for run in runs])


def _corrected_seconds(run: Observation, factor: NDArray[np.float64]) -> float:
    entry = run.job.calibration
    slowdown = entry.slowdown * math.exp(float(factor[0]))
    job = replace(run.job, calibration=entry.model_copy(update={"slowdown": slowdown}))
    return float(estimate(job, run.layout).step_seconds) * run.share
