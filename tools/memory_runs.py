"""Evidence of published runs about predicted peaks: values of three counters, and runs that ran out of memory."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from planner.cost.memory_band import MemoryDistribution, t_below
from planner.specs.calibration import MemorySpread
from planner.specs.job import RISK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from planner.evidence.compare.score import Row
    from planner.specs.calibration import Counter

Kind = Literal["exact", "above", "below"]

_MEASURED: Final[tuple[Counter, ...]] = ("allocated", "device", "reserved")
_COUNTERS: Final[tuple[Counter, ...]] = (*_MEASURED, "needed")
_LOCATIONS: Final = np.arange(-0.8, 0.801, 0.01)
_SCALES: Final = np.geomspace(0.01, 0.8, 45)
_MOST: Final = 5.0
"""Largest number of runs that one source counts as, because its runs have similar errors. Assumed."""
_BIAS: Final = 0.03
"""Standard deviation of the log location of all engines together.

Assumed, because the ledger's sums of tensors are within 3 % of the allocated bytes. More sources that report the
device's counter would replace the assumption.
"""
_SCATTER: Final = (0.08, 0.25)
"""Standard deviations of single engines around all engines: of locations, and of the logarithms of scales.

Assumed from the distances between the locations of the measured engines. Nearly every engine has only one source, so
the data do not determine these deviations.
"""
_WIDER: Final = (1.0, 4.0)
_INSIDE: Final = 0.8
_MANY: Final = 20
_FACTORS: Final = np.arange(*_WIDER, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """The logarithm of measured over predicted bytes of one run, or a bound of this logarithm.

    kind: `exact` for a value; for a bound, `above` if the run ran out of memory and needs more, `below` if it fitted.
    """

    source: str
    engine: str
    counter: Counter
    kind: Kind
    log: float


def memory_runs(rows: Iterable[Row]) -> list[MemoryRun]:
    """Values and bounds of each row; rows whose recompute policy is assumed give none.

    A value of the allocator's tensors also gives a value of the run's need, with the predicted runtime added. For other
    rows, the device's memory bounds the need: from above if the run succeeded, from below if it ran out of memory.
    """
    found = []
    for row in rows:
        run, told, peak, setup = row.run, row.predicted_memory_bytes, row.peak_bytes, row.setup
        if setup is None or not told or not peak or assumes_recompute(row):
            continue
        engine, measured = setup.job.engine.name, row.measured_memory_bytes

        def add(counter: Counter, kind: Kind, ratio: float, source: str = run.source_set, engine: str = engine) -> None:
            found.append(MemoryRun(source=source, engine=engine, counter=counter, kind=kind, log=math.log(ratio)))

        if measured and run.mem_class in _MEASURED:
            add(run.mem_class, "exact", measured / told)
        if run.oom:
            add("needed", "above", setup.job.cluster.device.memory / peak)
        elif measured and run.mem_class == "allocated":
            add("needed", "exact", (peak - told + measured) / peak)
        elif row.measured_seconds is not None:
            add("needed", "below", setup.job.cluster.device.memory / peak)
    return found


def assumes_recompute(row: Row) -> bool:
    """Whether the row's recompute policy is assumed, because the row does not state it."""
    return row.setup is not None and any(
        str(getattr(each, "key", each)).startswith("recompute") for each in row.setup.assumed
    )


def memory_spreads(runs: Sequence[MemoryRun]) -> tuple[MemorySpread, ...]:
    """Location and scale of each measured counter: of each engine, then of all engines.

    The values of an engine are shrunk towards the values of all engines together. Whether a run ran out of memory gives
    a bound of its need (a censored likelihood, as in Tobin, Econometrica 1958). Scales are widened until the bands, and
    the chances that a run fits into memory, are right for sources that the regression has not seen.
    """
    wider, wider_chances = _wider_bands(runs), _wider_chances(runs)
    return tuple(
        each.model_copy(update={"scale": round(each.scale * (wider_chances if each.counter == "needed" else wider), 4)})
        for each in _fitted(runs)
    )


def _wider_bands(runs: Sequence[MemoryRun]) -> float:
    """The factor on scales that makes bands from other sources contain 8 of 10 values; all sources weigh the same."""
    edges = []
    figures = [run for run in runs if run.kind == "exact" and run.counter != "needed"]
    for source in sorted({run.source for run in figures}):
        own = [run for run in figures if run.source == source]
        others = _fitted([run for run in runs if run.source != source])
        found = [(run, spread) for run in own if (spread := spread_of_run(others, run))]
        for run, spread in found:
            middle = MemoryDistribution(location=0.0, scale=spread.scale)
            edges.append((abs(run.log - spread.location) / math.log(middle.quantile(0.9)), 1 / len(found)))
    if not edges:
        return _WIDER[0]
    edges.sort()
    weights = np.cumsum([weight for _, weight in edges])
    enough = edges[int(np.searchsorted(weights, _INSIDE * weights[-1]))][0]
    return min(max(enough, _WIDER[0]), _WIDER[1])


def _wider_chances(runs: Sequence[MemoryRun]) -> float:
    """The factor on scales that makes a chance of 95 % right for each source outside the fit.

    The chance is right for a source if at most 5 % of its runs with at least this chance ran out of memory. Only
    sources with enough of these runs are checked.
    """
    factors = [_WIDER[0]]
    needed = [run for run in runs if run.counter == "needed"]
    for source in sorted({run.source for run in needed}):
        own = [run for run in needed if run.source == source and run.kind != "exact"]
        ran_out = np.array([run.kind == "above" for run in own])
        if ran_out.sum() < _MANY:
            continue
        others = _fitted([run for run in needed if run.source != source])
        found = [spread_of_run(others, run) for run in own]
        values = np.array(
            [
                (run.log - spread.location) / spread.scale if spread else 0.0
                for run, spread in zip(own, found, strict=True)
            ]
        )
        for factor in _FACTORS:
            told = t_below(values / factor) >= 1 - RISK
            if ran_out[told].sum() <= RISK * told.sum():
                break
        factors.append(float(factor))
    return max(factors)


def spread_of_run(spreads: Iterable[MemorySpread], run: MemoryRun) -> MemorySpread | None:
    """The spread of the run's engine; else the spread of all engines."""
    own = {each.engine: each for each in spreads if each.counter == run.counter}
    return own.get(run.engine) or own.get(None)


def _fitted(runs: Sequence[MemoryRun]) -> tuple[MemorySpread, ...]:
    found = []
    for counter in _COUNTERS:
        own = [run for run in runs if run.counter == counter]
        if not any(run.kind == "exact" for run in own):
            continue
        unbiased = (_LOCATIONS / _BIAS)[:, None] ** 2 / 2 + 0.0 * _SCALES[None, :]
        location, scale = _best(own, unbiased)
        prior = ((_LOCATIONS - location) / _SCATTER[0])[:, None] ** 2 / 2
        prior = prior + (np.log(_SCALES / scale) / _SCATTER[1])[None, :] ** 2 / 2
        engines = sorted({run.engine for run in own if run.kind != "below"})  # runs that fitted are one-sided bounds
        for engine in engines:
            members = [run for run in own if run.engine == engine]
            found.append(_spread(counter, engine, _best(members, prior), len(members)))
        found.append(_spread(counter, None, (location, scale), len(own)))
    return tuple(found)


def _spread(counter: Counter, engine: str | None, best: tuple[float, float], num_rows: int) -> MemorySpread:
    location, scale = best
    return MemorySpread(
        counter=counter, engine=engine, location=round(location, 3), scale=round(scale, 4), num_rows=num_rows
    )


def _best(runs: Sequence[MemoryRun], penalty: NDArray[np.float64]) -> tuple[float, float]:
    """The location and the scale with the greatest likelihood on a grid; penalty: (locations, scales)."""
    sizes: dict[str, int] = defaultdict(int)
    for run in runs:
        sizes[run.source] += 1
    weights: dict[tuple[str, float], float] = defaultdict(float)
    for run in runs:
        weights[run.kind, round(run.log, 2)] += min(1.0, _MOST / sizes[run.source])
    total = penalty.copy()
    for (kind, log), weight in weights.items():
        total += weight * _surprise(kind, log)
    place = np.unravel_index(int(np.argmin(total)), total.shape)
    return float(_LOCATIONS[place[0]]), float(_SCALES[place[1]])


@cache
def _surprise(kind: str, log: float) -> NDArray[np.float64]:
    """Minus the logarithm of a run's likelihood at every location and scale."""
    value = (log - _LOCATIONS[:, None]) / _SCALES[None, :]
    if kind == "exact":
        return np.asarray(2.5 * np.log1p(value**2 / 4) + np.log(_SCALES)[None, :])
    likely = t_below(-value) if kind == "above" else t_below(value)
    return np.asarray(-np.log(np.maximum(likely, 1e-12)))
