"""Learn corrections from a user's own runs: a Bayesian fit with the shipped calibration as its prior.

Each pair of device and engine has a factor for each cause of step time: compute, memory traffic, the host, the
innermost link, the outer links, fused attention. The slope of a run for a factor is the derivative of its log step time
by the log of this factor. The fit regresses the log errors of the runs on these slopes. The prior of a factor has the
mean 1, and the variance that this factor has over clusters of published runs (empirical Bayes). The fit averages over
two unknown numbers: the share of this variance that applies to the user's cluster, and the scatter of that cluster's
runs (as in Raftery, Madigan and Hoeting, JASA 1997). Few runs therefore change the factors little, and many runs
determine them. The shipped calibration comes from the same regression, with another prior (tools/calibrate.py).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.cost.band import kinds_of
from planner.cost.estimate import estimate
from planner.errors import InputError
from planner.specs.by_name import shipped_calibration
from planner.specs.calibration import Calibration, CalibrationEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.evidence.rows.observation import Observation
    from planner.layout import Layout
    from planner.specs.job import PoolJob

FACTORS: Final = ("slowdown", "scale_up", "network", "memory", "host", "core_attention")
"""The learnt factors of time: fields of a calibration entry."""

_SHARES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Possible shares of the published clusters' variance that apply to the user's cluster; all are equally likely."""

_SCATTERS: Final = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Possible ratios of the scatter of this cluster's runs to the scatter in published clusters.

All are equally likely.
"""

_OUTLIER: Final = 3.0
"""Distance from the fit, in scatters, beyond which a run's influence stops growing."""

_LARGEST_ERROR: Final = 0.4
"""Limit of a log error, measured from the median at the start of a fit."""

EIGHT_OF_TEN: Final = 1.0
"""Number of standard deviations that contain 8 of 10 future runs.

Errors have a sharper peak than a normal distribution.

With sources held out, this range contains 91, 86 and 81 % of a cluster's other rows after learning from 1, 3 and 5 of
its rows.
"""

_MOST: Final = math.log(20.0)
_SWEEPS: Final = 4
_STEP: Final = math.log(1.1)
_CLOSE: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The assumed distribution before any run of a cluster is known.

    spreads: standard deviations of the log factors, in the order of `FACTORS`.
    scatter: standard deviation of a run's log error around the prediction with its cluster's factors.
    """

    spreads: tuple[float, ...]
    scatter: float


PRIOR: Final = Prior(spreads=(0.16, 2.2, 0.61, 0.93, 0.18, 0.48), scatter=0.085)
"""The prior from the clusters of published runs, as `python tools/calibration_curve.py` prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Step seconds of one run: measured, and forecast before learning, after learning, and from the other runs only."""

    where: str
    measured: float
    before: float
    after: float
    left_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The correction of one device and engine, and the forecasts of the runs from which it was learnt."""

    entry: CalibrationEntry
    forecasts: tuple[Forecasts, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """The posterior of the factors.

    logs: log factors, (factors,).
    covariance: covariance of `logs`.
    scatter: scatter of a future run.
    """

    logs: NDArray[np.float64]
    covariance: NDArray[np.float64]
    scatter: float

    def spread(self, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Standard deviation of the log error of future runs with these slopes, (runs,).

        slopes: (runs, factors).
        """
        found: NDArray[np.float64] = np.sqrt(
            np.einsum("rf,fg,rg->r", slopes, self.covariance, slopes) + self.scatter**2
        )
        return found


def posterior(slopes: NDArray[np.float64], errors: NDArray[np.float64], prior: Prior = PRIOR) -> Posterior:
    """The posterior of the log factors, in the model: log errors are slopes times log factors, plus scatter.

    slopes: derivatives of the log forecast by each log factor, (runs, factors).
    errors: log(measured / forecast), (runs,).

    Source: conjugate Bayesian linear regression (Gelman et al., Bayesian Data Analysis, 3rd edition, section 14.2); the
    scales of prior and scatter are averaged over by their marginal likelihood; Huber (1964) for outliers.
    """
    middle = float(np.median(errors)) if len(errors) else 0.0
    found = _averaged(slopes, np.clip(errors, middle - _LARGEST_ERROR, middle + _LARGEST_ERROR), prior)
    for _ in range(_SWEEPS):
        fitted, far = slopes @ found.logs, _OUTLIER * found.scatter
        found = _averaged(slopes, np.clip(errors, fitted - far, fitted + far), prior)
    return found


def regression(
    slopes: NDArray[np.float64],
    errors: NDArray[np.float64],
    precision: NDArray[np.float64],
    weights: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Means, (..., factors), and covariances of the log factors, in the model of `posterior` with known variances.

    slopes, errors: as in `posterior`.
    precision: inverse variances of the log factors before any run is known, (..., factors); their means are 0.
    weights: inverse variances of the runs' scatter, (..., runs).

    Source: as in `posterior`.
    """
    weighted = slopes.T * weights[..., None, :]  # (..., factors, runs)
    covariances = np.linalg.inv(weighted @ slopes + precision[..., None] * np.eye(slopes.shape[1]))
    return (covariances @ (weighted @ errors)[..., None])[..., 0], covariances


def _averaged(slopes: NDArray[np.float64], errors: NDArray[np.float64], prior: Prior) -> Posterior:
    grid = list(itertools.product(_SHARES, _SCATTERS))
    variances = np.array([share for share, _ in grid])[:, None] * np.square(prior.spreads)  # (grid, factors)
    noise = np.square(prior.scatter * np.array([scatter for _, scatter in grid]))  # (grid,)
    means, covariances = regression(slopes, errors, 1 / variances, np.tile(1 / noise[:, None], len(errors)))
    unexplained = (errors @ errors - means @ (slopes.T @ errors)) / noise
    volume = len(errors) * np.log(noise) - np.linalg.slogdet(covariances)[1] + np.log(variances).sum(axis=1)
    likelihood = -(volume + unexplained) / 2
    weights = np.exp(likelihood - likelihood.max())
    weights /= weights.sum()
    logs = weights @ means
    apart = means - logs
    return Posterior(
        logs=logs,
        covariance=np.einsum("g,gij->ij", weights, covariances + apart[:, :, None] * apart[:, None, :]),
        scatter=math.sqrt(float(weights @ noise)),
    )


def slopes_of(job: PoolJob, layout: Layout) -> NDArray[np.float64]:
    """Derivatives of the log step seconds by each log factor, (factors,), from prices with a factor a tenth larger."""
    before = _log_seconds(job, layout)
    steps = np.eye(len(FACTORS)) * _STEP
    return np.array([(_log_seconds(with_factors(job, each), layout) - before) / _STEP for each in steps])


def with_factors(job: PoolJob, logs: NDArray[np.float64]) -> PoolJob:
    """The job, with each value of its calibration multiplied by a factor; `logs` has the logarithms of the factors."""
    return replace(job, calibration=job.calibration.model_copy(update=_fields(logs, over=job.calibration)))


def _fields(logs: NDArray[np.float64], *, over: CalibrationEntry) -> dict[str, Any]:
    """Fields of a calibration entry with these factors."""
    return {name: getattr(over, name) * float(factor) for name, factor in zip(FACTORS, np.exp(logs), strict=True)}


def _log_seconds(job: PoolJob, layout: Layout) -> float:
    return math.log(float(estimate(job, layout).step_seconds))


def learn(observations: Sequence[Observation]) -> tuple[Learnt, ...]:
    """A correction for each pair of device and engine that has runs, in the order of their first runs.

    Raises:
        InputError: `observations` is empty.
    """
    if not observations:
        raise InputError("no run is left to learn from", hint="give a run that was measured")
    kinds: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for each in observations:
        kinds[each.kind].append(each)
    return tuple(_learn_kind(device, engine, own) for (device, engine), own in kinds.items())


def learn_calibration(observations: Sequence[Observation]) -> tuple[Calibration, tuple[Learnt, ...]]:
    """The shipped calibration with the learnt entries in front; they are found first, and multiply the shipped entries.

    Raises:
        InputError: `observations` is empty.
    """
    learnt, shipped = learn(observations), shipped_calibration()
    entries = (*(each.entry for each in learnt), *shipped.entries)
    return shipped.model_copy(update={"entries": entries}), learnt


def calibration_text(calibration: Calibration) -> str:
    """The calibration as JSON with one entry per line, so that a change of an entry changes one line."""
    lists = []
    for name, members in calibration.model_dump(mode="json", exclude_defaults=True).items():
        if isinstance(members, dict):
            lists.append(f' "{name}": {json.dumps(members)}')
            continue
        lines = ",\n".join("  " + json.dumps(member) for member in members)
        lists.append(f' "{name}": [\n{lines}\n ]')
    return "{\n" + ",\n".join(lists) + "\n}\n"


def _learn_kind(device: str, engine: str, runs: Sequence[Observation]) -> Learnt:
    """The correction of one device and engine by Gauss-Newton: slopes at the shipped, then at the learnt factors."""
    measured = np.log([run.measured_seconds for run in runs])
    logs = np.zeros(len(FACTORS))
    before = predicted = _predicted(runs, logs)
    for sweep in range(_SWEEPS):
        if sweep < 2:
            slopes = np.array([slopes_of(with_factors(run.job, logs), run.layout) for run in runs])
        errors = measured - predicted + slopes @ logs
        found = posterior(slopes, errors)
        moved = np.clip(found.logs, -_MOST, _MOST)
        predicted, near = _predicted(runs, moved), bool(np.abs(moved - logs).max() < _CLOSE)
        logs = moved
        if near:
            break
    left_out = []
    for index in range(len(runs)):
        others = np.arange(len(runs)) != index
        own = np.clip(posterior(slopes[others], errors[others]).logs, -_MOST, _MOST)
        left_out.append(float(_predicted([runs[index]], own)[0]))
    spread = float(np.mean(found.spread(slopes)))
    entry = CalibrationEntry(
        device=device,
        engine=engine,
        **{name: round(value, 4) for name, value in _fields(logs, over=CalibrationEntry()).items()},
        low=round(math.exp(-EIGHT_OF_TEN * spread), 4),
        high=round(math.exp(EIGHT_OF_TEN * spread), 4),
        kinds=tuple(dict.fromkeys(kind for run in runs for kind in kinds_of(run.job, run.layout))),
        num_rows=len(runs),
        sources=tuple(dict.fromkeys(run.source for run in runs)),
    )
    seconds = (np.exp(each).tolist() for each in (measured, before, predicted, np.array(left_out)))
    return Learnt(
        entry=entry,
        forecasts=tuple(
            Forecasts(where=run.where, measured=a, before=b, after=c, left_out=d)
            for run, a, b, c, d in zip(runs, *seconds, strict=True)
        ),
    )


def _predicted(runs: Sequence[Observation], logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log seconds of each run's step with these factors, (runs,)."""
    found = [_log_seconds(with_factors(run.job, logs), run.layout) + math.log(run.share) for run in runs]
    return np.array(found)
