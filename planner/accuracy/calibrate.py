"""Fit the shipped calibration, and measure its errors on held-out sources.

    python -m planner.accuracy.calibrate RUNS.csv planner/calibration.json

The slowdown of compute relative to the roofline is a product of factors: for the precision class, the engine, the
device, the kind of layers, and for their combinations. A penalty keeps the factors of combinations near 1 unless many
runs contradict. A combination without measured runs uses the factors of its parts. This is a mixed model (Gelman and
Hill 2007, chapter 12), with the penalties that forecast whole sources best. Each pair of device and engine also has the
share of peak that fused attention reaches. No constant belongs to a single model. The evidence for error bands comes
from folds that hold out whole sources.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planner.accuracy.jobs import Unsupported, job_of
from planner.accuracy.memory_runs import memory_runs, memory_spreads
from planner.accuracy.runs import read_runs
from planner.accuracy.score import score, step_seconds
from planner.cost.band import axes_of, features_of, spread_of
from planner.cost.limits import unpriced
from planner.specs.calibration import Calibration, CalibrationEntry, Evidence, precision_class
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from planner.accuracy.jobs import Setup
    from planner.accuracy.memory_runs import MemoryRun
    from planner.accuracy.runs import Run

UNFITTED_SOURCES: Final = ("megatron-sc21-t1", "megatron-sc21-t2", "korthikanti-t5")
"""Sources for validation only: no constant is fitted on them (docs/decisions.md, 63)."""

UNFITTED_ENGINES: Final = ("megatron-2021", "megatron-2022")
"""Engines without a fitted factor, because all their runs are in the unfitted sources."""

_SHARES: Final = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7)
_PRICED_SHARES: Final = (0.15, 0.35, 0.7)
_SLOWDOWNS: Final = np.array([0.6, 1.0, 1.6, 2.6])
_USUAL_SHARE: Final = _SHARES.index(0.45)
_SHARE_PENALTY: Final = 0.3

_TERMS: Final = (
    ("device", "engine", "precision", "experts"),
    ("device", "engine"),
    ("device", "precision"),
    ("engine", "precision"),
    ("engine", "experts"),
    ("device",),
    ("engine",),
    ("precision",),
    ("experts",),
)
"""The keys of each group of factors, from the most to the least specific."""

_PENALTY: Final = {1: 3.0, 2: 4.5, 4: 7.5}
"""Weight of a squared log factor, in runs, for each number of keys that the factor combines."""

_NOISE: Final = 0.05
"""Limit of log errors: above it they count by absolute value, not square, because published runs have outliers."""

_SWEEPS: Final = 24
_FOLDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured run as input of the fit: its step seconds at each attention share and at a few slowdowns.

    seconds: array of shape (shares, slowdowns); between `_SLOWDOWNS` it is linear in the slowdown.
    """

    run: str
    source: str
    keys: dict[str, str | bool]
    axes: str
    fold: int
    features: tuple[str, ...] = ()
    measured_seconds: float
    seconds: NDArray[np.float64]

    @property
    def kind(self) -> dict[str, Any]:
        """The keys by which the evidence of error bands is grouped."""
        return {**self.keys, "axes": self.axes, "features": self.features}

    def group(self, term: tuple[str, ...]) -> tuple[str | bool, ...]:
        """The sample's group for one term."""
        return tuple(self.keys[key] for key in term)


_Group = tuple[tuple[str, ...], tuple[str | bool, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Log factors of every group of the samples, and for every pair of device and engine a position in _SHARES."""

    intercept: float
    factors: dict[_Group, float]
    shares: dict[tuple[str | bool, ...], int]

    def predicted(self, sample: Sample) -> float:
        """Step seconds of a run; a group without samples has the factor 1."""
        if sample.keys["engine"] in UNFITTED_ENGINES:
            return float(_at(sample.seconds[_USUAL_SHARE], 1.0)[0])
        share = self.shares.get(sample.group(_TERMS[1]), _USUAL_SHARE)
        log_slowdown = self.intercept + sum_of(self.factors.get((term, sample.group(term)), 0.0) for term in _TERMS)
        return float(_at(sample.seconds[share], np.exp(log_slowdown))[0])


def _at(seconds: NDArray[np.float64], slowdown: Any) -> tuple[Any, Any]:
    """Seconds, and their slope, at a slowdown.

    seconds: array of shape (..., slowdowns), extrapolated outside `_SLOWDOWNS`.
    """
    slopes = np.diff(seconds) / np.diff(_SLOWDOWNS)
    place = np.clip(np.searchsorted(_SLOWDOWNS, slowdown) - 1, 0, len(_SLOWDOWNS) - 2)[..., None]
    slope = np.take_along_axis(slopes, place, -1)[..., 0]
    start = np.take_along_axis(seconds, place, -1)[..., 0]
    return start + slope * (slowdown - np.take(_SLOWDOWNS, place[..., 0])), slope


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
    shares = _PRICED_SHARES if job.training.attention == "flash" else _PRICED_SHARES[:1]
    seconds = np.stack([_over_shares(setup, float(slowdown), shares) for slowdown in _SLOWDOWNS], axis=-1)
    size = f"{job.model.hidden_size}x{job.model.num_layers}"
    return Sample(
        run=run.id,
        source=run.source_set,
        keys={
            "device": job.cluster.device.name,
            "engine": job.engine.name,
            "precision": precision_class(job.training.precision),
            "experts": job.model.moe is not None,
        },
        axes=axes_of(setup.layout),
        features=features_of(job, setup.layout),
        fold=zlib.crc32(size.encode()) % _FOLDS,
        measured_seconds=measured_seconds,
        seconds=seconds,
    )


def _over_shares(setup: Setup, slowdown: float, priced: Sequence[float]) -> NDArray[np.float64]:
    """Step seconds at each attention share.

    Attention's time is inversely proportional to its share, so a few prices determine all others.
    """
    entries = [CalibrationEntry(slowdown=slowdown, attention=share) for share in priced]
    seconds = [step_seconds(replace(setup, job=replace(setup.job, calibration=entry))) for entry in entries]
    return np.interp(-1.0 / np.array(_SHARES), -1.0 / np.array(priced), seconds)


def _fitted(samples: Iterable[Sample]) -> list[Sample]:
    return [s for s in samples if s.source not in UNFITTED_SOURCES and s.keys["engine"] not in UNFITTED_ENGINES]


def _fit(samples: Sequence[Sample]) -> _Fit:
    """The factors and shares that minimise the penalised |log(measured / predicted)|, by reweighted least squares.

    Each sweep linearises the logarithm of the prediction. Every third sweep also chooses the attention shares again.

    Source: Huber (1964) for the weights; Gauss-Newton.
    """
    used = _fitted(samples)
    if not used:
        return _Fit(intercept=0.0, factors={}, shares={})
    groups: dict[_Group, int] = {}
    columns = [[groups.setdefault((term, s.group(term)), len(groups)) for term in _TERMS] for s in used]
    rows = np.arange(len(used))
    design = np.zeros((len(used), len(groups) + 1))
    design[:, -1] = 1.0  # the intercept
    for column in np.array(columns).T:
        design[rows, column] = 1.0
    penalty = np.array([*(_PENALTY[len(term)] for term, _ in groups), 0.5])
    members = defaultdict(list)
    for row, sample in enumerate(used):
        members[sample.group(_TERMS[1])].append(row)
    measured = np.log([s.measured_seconds for s in used])
    seconds = np.array([s.seconds for s in used])
    logs, shares = np.zeros(len(groups) + 1), np.full(len(used), _USUAL_SHARE)
    for sweep in range(_SWEEPS):
        slowdown = np.exp(design @ logs)
        predicted, slope = _at(seconds[rows, shares], slowdown)
        error = measured - np.log(predicted)
        weight = _NOISE / np.maximum(np.abs(error), _NOISE)
        gradient = design * (slope * slowdown / predicted)[:, None]
        normal = gradient.T @ (gradient * weight[:, None]) + np.diag(penalty)
        step = np.linalg.solve(normal, gradient.T @ (weight * error) - penalty * logs)
        logs = logs + np.clip(step, -0.5, 0.5)
        if sweep % 3 == 2:
            every = _at(seconds, np.broadcast_to(np.exp(design @ logs)[:, None], seconds.shape[:2]))[0]
            shares = _best_shares(members, np.abs(measured[:, None] - np.log(every)))
    return _Fit(
        intercept=float(logs[-1]),
        factors={group: float(logs[column]) for group, column in groups.items()},
        shares={group: int(shares[own[0]]) for group, own in members.items()},
    )


def _best_shares(members: dict[tuple[str | bool, ...], list[int]], errors: NDArray[np.float64]) -> NDArray[np.int64]:
    """Position of the best attention share of each sample's device and engine; errors: (samples, shares)."""
    distance = _SHARE_PENALTY * np.abs(np.log(np.array(_SHARES) / _SHARES[_USUAL_SHARE]))
    found = np.empty(len(errors), dtype=np.int64)
    for own in members.values():
        found[own] = int(np.argmin(errors[own].sum(axis=0) + distance))
    return found


def held_out_ratios(samples: Sequence[Sample], folds: Sequence[int]) -> NDArray[np.float64]:
    """Measured over predicted seconds of each sample, from a fit without its fold; shape (samples,)."""
    ratios = np.empty(len(samples))
    for fold in set(folds):
        fit = _fit([s for s, own in zip(samples, folds, strict=True) if own != fold])
        for i, (sample, own) in enumerate(zip(samples, folds, strict=True)):
            if own == fold:
                ratios[i] = sample.measured_seconds / fit.predicted(sample)
    return ratios


def fitted_ratios(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Measured over predicted seconds of each sample, from a fit of all samples (in-sample); shape (samples,)."""
    fit = _fit(samples)
    return np.array([sample.measured_seconds / fit.predicted(sample) for sample in samples])


def calibrate(samples: Sequence[Sample], memory: Sequence[MemoryRun] = ()) -> Calibration:
    """The calibration from all samples, with evidence from folds that hold out whole sources."""
    fit = _fit(samples)
    entries = [CalibrationEntry.model_validate({"engine": name, "alone": True}) for name in UNFITTED_ENGINES]
    for term in _TERMS:
        for _, group in sorted((key for key in fit.factors if key[0] == term), key=str):
            members = [s for s in _fitted(samples) if s.group(term) == group]
            entries.append(
                CalibrationEntry.model_validate(
                    {
                        **dict(zip(term, group, strict=True)),
                        "slowdown": round(float(np.exp(fit.factors[term, group])), 4),
                        "attention": _SHARES[fit.shares[group]] if term == _TERMS[1] else None,
                        "num_rows": len(members),
                        "sources": tuple(sorted({s.source for s in members})),
                    }
                )
            )
    entries.append(CalibrationEntry(slowdown=round(float(np.exp(fit.intercept)), 4)))
    evidence = evidence_of(samples, held_out_ratios(samples, source_folds(samples)))
    spread = spread_of(evidence).model_copy(update={"memory": memory_spreads(memory)})
    return Calibration(entries=tuple(entries), evidence=evidence, spread=spread)


def source_folds(samples: Iterable[Sample]) -> list[int]:
    """The fold of each sample; each source is one fold."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(sample.source, len(numbers)) for sample in samples]


def evidence_of(samples: Sequence[Sample], ratios: NDArray[np.float64]) -> tuple[Evidence, ...]:
    """Sorted held-out ratios of each kind of run in each source."""
    kinds = defaultdict(list)
    for sample, ratio in zip(samples, ratios, strict=True):
        kinds[sample.source, tuple(sample.kind.items())].append(round(float(ratio), 4))
    return tuple(
        Evidence.model_validate({"source": source, **dict(keys), "ratios": tuple(sorted(own))})
        for (source, keys), own in sorted(kinds.items(), key=str)
    )


def main(arguments: Sequence[str]) -> None:
    """Fit RUNS.csv and write the calibration file."""
    runs, output = arguments
    table = read_runs(Path(runs))
    found = calibrate(read_samples(table), memory_runs(map(score, table)))
    Path(output).write_text(calibration_text(found), encoding="utf-8")


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


if __name__ == "__main__":
    main(sys.argv[1:])
