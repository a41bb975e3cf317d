"""What published runs say about predicted peaks: figures of three counters, and whether a run ran out of memory."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np

from planner.cost.memory_band import MemoryDistribution, t_below
from planner.specs.calibration import MemorySpread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from planner.accuracy.score import Row
    from planner.specs.calibration import Counter

_COUNTERS: Final[tuple[Counter, ...]] = ("allocated", "device", "reserved")
_LOCATIONS: Final = np.arange(-0.8, 0.801, 0.01)
_SCALES: Final = np.geomspace(0.01, 0.8, 45)
_MOST: Final = 5.0
"""A source counts as at most this many runs: its runs miss alike. Assumed."""
_BIAS: Final = 0.03
"""Of the log location of all engines together, one standard deviation: assumed, as the ledger's sums of tensors are
within 3 % of what was allocated. More sources with figures of the device's counter would settle it."""
_SCATTER: Final = (0.15, 0.5)
"""Of engines about all: of locations, and of the logarithms of scales. Assumed: a few sources move them."""
_WIDER: Final = (1.0, 4.0)
_INSIDE: Final = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """The logarithm of measured over predicted bytes of one run, or a bound of it.

    kind: `exact`; `above` the bound where the run ran out of memory; `below` it where it ran.
    """

    source: str
    engine: str
    counter: Counter
    kind: Literal["exact", "above", "below"]
    log: float


def memory_runs(rows: Iterable[Row]) -> list[MemoryRun]:
    """A run for each row with a figure of memory, or with an outcome; rows that assume their recompute have none."""
    found = []
    for row in rows:
        run, told, setup = row.run, row.predicted_memory_bytes, row.setup
        if setup is None or not told or run.mem_class not in ("", *_COUNTERS) or assumes_recompute(row):
            continue
        if row.measured_memory_bytes and not run.mem_class:
            continue
        measured = row.measured_memory_bytes
        if not measured and run.mem_class not in ("", "device"):
            continue
        if not measured and not run.oom and row.measured_seconds is None:
            continue
        found.append(
            MemoryRun(
                source=run.source_set,
                engine=setup.job.engine.name,
                counter=cast("Counter", run.mem_class) if measured else "device",
                kind="exact" if measured else "above" if run.oom else "below",
                log=math.log((measured or setup.job.cluster.device.memory) / told),
            )
        )
    return found


def assumes_recompute(row: Row) -> bool:
    """The row does not say whether activations are recomputed."""
    return row.setup is not None and any(
        str(getattr(each, "key", each)).startswith("recompute") for each in row.setup.assumed
    )


def memory_spreads(runs: Sequence[MemoryRun]) -> tuple[MemorySpread, ...]:
    """Location and scale for each counter that has figures: of each engine, then of all.

    An engine's are drawn towards those of all. Runs that ran out of memory and runs that ran bound what the counter of
    the device would have shown (a censored likelihood, as in Tobin, Econometrica 1958). Scales are widened until bands
    from the other sources hold 8 of 10 figures of a source, sources alike.
    """
    edges = []
    for source in sorted({run.source for run in runs if run.kind == "exact"}):
        own = [run for run in runs if run.source == source and run.kind == "exact"]
        others = _fitted([run for run in runs if run.source != source])
        found = [(run, spread) for run in own if (spread := spread_of_run(others, run))]
        for run, spread in found:
            middle = MemoryDistribution(location=0.0, scale=spread.scale)
            edges.append((abs(run.log - spread.location) / math.log(middle.quantile(0.9)), 1 / len(found)))
    if not edges:
        return _fitted(runs)
    edges.sort()
    weights = np.cumsum([weight for _, weight in edges])
    enough = edges[int(np.searchsorted(weights, _INSIDE * weights[-1]))][0]
    wider = min(max(enough, _WIDER[0]), _WIDER[1])
    return tuple(each.model_copy(update={"scale": round(each.scale * wider, 4)}) for each in _fitted(runs))


def spread_of_run(spreads: Iterable[MemorySpread], run: MemoryRun) -> MemorySpread | None:
    """That of the run's engine; else that of all engines."""
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
        engines = sorted({run.engine for run in own if run.kind == "exact"})  # runs that ran bound it on one side alone
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
    """The location and the scale of greatest likelihood on a grid; penalty: (locations, scales)."""
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
