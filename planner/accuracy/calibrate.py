"""Fits the calibration that is shipped, and measures on held-out model sizes how far it is off.

    python -m planner.accuracy.calibrate RUNS.csv planner/calibration.json

For each device, engine, precision class and kind of layers two numbers are fitted: how much slower than the
roofline computing is, and the share of peak that fused attention reaches. The fit takes the least mean absolute
log error, shrunk towards the next coarser group where runs are few. Never a constant for a model. The error band
of an entry comes from folds that hold whole model sizes out.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.accuracy.jobs import Unsupported, job_of
from planner.accuracy.runs import read_runs
from planner.cost.estimate import estimate
from planner.cost.limits import unpriced
from planner.specs.calibration import Calibration, CalibrationEntry, precision_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from planner.accuracy.jobs import Setup
    from planner.accuracy.runs import Run

__all__ = ["Sample", "calibrate", "held_out_ratios", "read_samples"]

UNFITTED_SOURCES: Final = ("megatron-sc21-t1", "korthikanti-t5")
"""Kept for validation: no constant is fitted on them (docs/decisions.md, 6)."""

UNFITTED_ENGINE: Final = "megatron-2021"
"""Its runs are those of the unfitted sources, so the roofline stands as it is."""

_SHARES: Final = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7)
_LEVELS: Final = (
    ("device", "engine", "precision", "experts"),
    ("device", "precision", "experts"),
    ("engine", "precision", "experts"),
    ("precision", "experts"),
)
"""Groups from the finest to the coarsest; the first one that has an entry counts."""

_PRIOR_ROWS: Final = 4.0
"""The coarser group weighs as much as this many runs."""

_FEW: Final = 8
"""A band needs at least this many held-out runs; below, the coarser group's is taken."""

_FOLDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured run as the fit sees it: step seconds are rest + slowdown * compute, for each attention share."""

    run: str
    source: str
    keys: dict[str, str | bool]
    axes: dict[str, int]
    fold: int
    measured_seconds: float
    rest_seconds: NDArray[np.float64]
    compute_seconds: NDArray[np.float64]

    def group(self, level: tuple[str, ...]) -> tuple[str | bool, ...]:
        """The sample's place among the groups of one level."""
        return tuple(self.keys[key] for key in level)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    share: int  # position in _SHARES
    slowdown: float


_Fits = dict[tuple[tuple[str, ...], tuple[str | bool, ...]], _Fit]


def read_samples(runs: Iterable[Run]) -> list[Sample]:
    """The runs that can be priced and were measured."""
    samples = []
    for run in runs:
        setup = job_of(run)
        if run.measured_step_seconds is None or isinstance(setup, Unsupported) or unpriced(setup.job, setup.layout):
            continue
        samples.append(_sample(run, setup, run.measured_step_seconds))
    return samples


def _sample(run: Run, setup: Setup, measured_seconds: float) -> Sample:
    job = setup.job
    shares = _SHARES if job.training.attention == "flash" else _SHARES[:1]
    once, half_more = (
        np.array(
            [
                estimate(
                    replace(job, calibration=CalibrationEntry(slowdown=slowdown, attention=share)), setup.layout
                ).step_seconds
                for share in shares
            ]
        )
        * setup.share
        for slowdown in (1.0, 1.5)
    )
    compute = np.broadcast_to((half_more - once) / 0.5, (len(_SHARES),))
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
        axes={axis: getattr(setup.layout, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "zero")},
        fold=zlib.crc32(size.encode()) % _FOLDS,
        measured_seconds=measured_seconds,
        rest_seconds=np.broadcast_to(once, (len(_SHARES),)) - compute,
        compute_seconds=compute,
    )


def _fit(samples: Sequence[Sample], prior: _Fit | None) -> _Fit:
    """The attention share and slowdown of least mean |log(measured / predicted)|, shrunk towards `prior`."""
    measured = np.array([s.measured_seconds for s in samples])
    best, least = _Fit(share=0, slowdown=1.0), np.inf
    for share in range(len(_SHARES)):
        rest = np.array([s.rest_seconds[share] for s in samples])
        compute = np.array([s.compute_seconds[share] for s in samples])
        wanted = np.clip((measured - rest) / compute, 0.3, 6.0)
        for slowdown in np.quantile(wanted, np.linspace(0.1, 0.9, 33)):
            loss = float(np.mean(np.abs(np.log(measured / (rest + slowdown * compute)))))
            if prior is not None:
                distance = (
                    abs(np.log(slowdown / prior.slowdown)) + abs(np.log(_SHARES[share] / _SHARES[prior.share])) / 3
                )
                loss += 0.3 * distance * _PRIOR_ROWS / len(samples)
            if loss < least:
                best, least = _Fit(share=share, slowdown=float(slowdown)), loss
    return best


def _fit_levels(samples: Sequence[Sample]) -> _Fits:
    """A fit for every group of every level, coarse groups first."""
    used = [s for s in samples if s.source not in UNFITTED_SOURCES and s.keys["engine"] != UNFITTED_ENGINE]
    fits: _Fits = {}
    for depth in reversed(range(len(_LEVELS))):
        level = _LEVELS[depth]
        groups: dict[tuple[str | bool, ...], list[Sample]] = {}
        for sample in used:
            groups.setdefault(sample.group(level), []).append(sample)
        for key, members in groups.items():
            fits[level, key] = _fit(members, _coarser(fits, members[0], depth + 1))
    return fits


def _coarser(fits: _Fits, sample: Sample, depth: int) -> _Fit | None:
    """The fit of the first level from `depth` on that knows the sample's group."""
    return next(
        (fits[level, sample.group(level)] for level in _LEVELS[depth:] if (level, sample.group(level)) in fits), None
    )


def _predicted(fits: _Fits, sample: Sample) -> float:
    fit = None if sample.keys["engine"] == UNFITTED_ENGINE else _coarser(fits, sample, 0)
    fit = fit or _Fit(share=_SHARES.index(0.45), slowdown=1.0)
    return float(sample.rest_seconds[fit.share] + fit.slowdown * sample.compute_seconds[fit.share])


def held_out_ratios(samples: Sequence[Sample], folds: Sequence[int]) -> NDArray[np.float64]:
    """Measured over predicted of each sample, predicted by a fit without any sample of its fold; shape (samples,)."""
    ratios = np.empty(len(samples))
    for fold in set(folds):
        fits = _fit_levels([s for s, own in zip(samples, folds, strict=True) if own != fold])
        for i, (sample, own) in enumerate(zip(samples, folds, strict=True)):
            if own == fold:
                ratios[i] = sample.measured_seconds / _predicted(fits, sample)
    return ratios


def calibrate(samples: Sequence[Sample]) -> Calibration:
    """The calibration of all samples, with bands from folds that hold whole model sizes out."""
    ratios = held_out_ratios(samples, [s.fold for s in samples])
    fits = _fit_levels(samples)
    unfitted = [i for i, s in enumerate(samples) if s.keys["engine"] == UNFITTED_ENGINE]
    entries = [_entry({"engine": UNFITTED_ENGINE}, None, samples, ratios, unfitted)]
    for level in _LEVELS:
        for _, key in sorted((k for k in fits if k[0] == level), key=str):
            members = [
                i for i, s in enumerate(samples) if s.group(level) == key and s.keys["engine"] != UNFITTED_ENGINE
            ]
            named = dict(zip(level, key, strict=True))
            entries.append(_entry(named, fits[level, key], samples, ratios, members))
    return Calibration(entries=tuple(entries))


def _entry(
    keys: dict[str, str | bool],
    fit: _Fit | None,
    samples: Sequence[Sample],
    ratios: NDArray[np.float64],
    members: Sequence[int],
) -> CalibrationEntry:
    band = members
    for level in _LEVELS[1:]:
        if len(band) >= _FEW or fit is None:
            break
        band = [i for i, s in enumerate(samples) if all(keys.get(k, s.keys[k]) == s.keys[k] for k in level)]
    low, high = (float(np.quantile(ratios[list(band)], q)) for q in (0.1, 0.9))
    return CalibrationEntry.model_validate(
        {
            **keys,
            "slowdown": round(fit.slowdown, 4) if fit else 1.0,
            "attention": _SHARES[fit.share] if fit else None,
            "low": round(min(low, 1.0), 4),
            "high": round(max(high, 1.0), 4),
            "num_rows": len(members),
            "sources": tuple(sorted({samples[i].source for i in members})),
        }
    )


def main(arguments: Sequence[str]) -> None:
    """Fit RUNS.csv and write the calibration file."""
    runs, output = arguments
    samples = read_samples(read_runs(Path(runs)))
    document = calibrate(samples).model_dump_json(indent=1, exclude_none=True)
    Path(output).write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
