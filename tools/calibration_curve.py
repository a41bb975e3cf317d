"""Measures, on the published runs, how much a few runs of a cluster improve the forecasts of its other layouts.

    python tools/calibration_curve.py [PRICED.pickle]

A cluster is a source, a device, the devices of a node and the line rate, with at least 20 rows. Rows are forecast by
a fit without any run of their source. Then k rows of the cluster, drawn 20 times by seed, correct the forecasts of the
other rows. As in `planner.evidence.fit`, a row corrects only rows of its own engine; if no row of an engine is drawn,
the forecasts of its rows stay as they are. The prior is fitted to clusters of other sources. The output is the median
error of the other rows, its mean over the clusters, and the width of the band (high / low) and the share of the rows
inside it: before any row of the cluster the band of published runs of other sources, then that of the corrected rows.
`constant` is the median error with the best constant factor for each cluster, chosen in hindsight from all rows. With a
file name, prices are stored in this file and read again.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from accuracy_figures import LARGEST
from calibrate import (
    UNFITTED_ENGINES,
    Sample,
    evidence_of,
    held_out_ratios,
    read_samples,
    source_folds,
)

from planner.cost.band import band_of
from planner.evidence import NARROWED
from planner.evidence.fit import EIGHT_OF_TEN, FACTORS, PRIOR, Prior, posterior, slopes_of
from planner.evidence.rows.jobs import Unsupported, job_of
from planner.evidence.rows.runs import read_runs
from planner.specs.by_name import shipped_calibration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.evidence.rows.runs import Run

ROOT: Final = Path(__file__).parents[1]
RUNS: Final = ROOT / "tests" / "published" / "measurements.csv"
KS: Final = (0, 1, 3, 5)
REACH: Final = {1: 0.75, 3: 0.6, 5: 0.5}
DRAWS: Final = 20
FEWEST_ROWS: Final = 20
FEWEST_OF_PRIOR: Final = 3
CHUNK: Final = 32
MOST_RUNS: Final = 12  # one cluster counts as at most so many runs when the prior is learnt
LARGEST_ERROR: Final = 0.4  # limit of a log error in a prior


Name = tuple[str, str, int, float]
"""Source, device, devices of a node, and line rate in GB/s."""


class Priced(NamedTuple):
    """A priced row with its cluster and its slopes."""

    sample: Sample
    cluster: Name
    slopes: NDArray[np.float64]


class Cluster(NamedTuple):
    """Slopes, (rows, factors), held-out log errors and engines, (rows,), and logs of the band's ends, (rows, 2)."""

    slopes: NDArray[np.float64]
    errors: NDArray[np.float64]
    engines: NDArray[np.str_]
    bands: NDArray[np.float64]

    def rows(self, chosen: NDArray[Any]) -> Cluster:
        """Some rows of the cluster."""
        return Cluster(*(column[chosen] for column in self))

    def by_engine(self) -> dict[str, Cluster]:
        """The rows of each engine."""
        return {str(name): self.rows(self.engines == name) for name in np.unique(self.engines)}


def price(runs: Sequence[Run]) -> list[Priced]:
    """Rows that were measured and can be priced."""
    found = []
    for run in runs:
        setup = job_of(run)
        for sample in read_samples([run]):
            assert not isinstance(setup, Unsupported)
            cluster = setup.job.cluster
            rate = round(cluster.links[-1].bandwidth / 1e9, 1)
            name = (run.source_set, cluster.device.name, cluster.devices_per_host, rate)
            found.append(Priced(sample, name, slopes_of(setup.job, setup.layout)))
    return found


def priced_runs(kept: Path | None) -> list[Priced]:
    """All rows of the table, priced by two processes or read from `kept`."""
    if kept is not None and kept.exists():
        return list(pickle.loads(kept.read_bytes()))  # noqa: S301 - a file of this tool's own
    runs = read_runs(RUNS)
    chunks = [runs[start : start + CHUNK] for start in range(0, len(runs), CHUNK)]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        found = [each for part in pool.map(price, chunks) for each in part]
    if kept is not None:
        kept.write_bytes(pickle.dumps(found))
    return found


def clusters_of(rows: Sequence[Priced], *, of_prior: bool) -> dict[Name, Cluster]:
    """Rows by cluster, forecast by a fit without their source; for a prior, only rows that a fit may use."""
    samples = [row.sample for row in rows]
    ratios = held_out_ratios(samples, source_folds(samples))
    evidence, spread = evidence_of(samples, ratios), shipped_calibration().spread

    @cache
    def band_without(source: str, kind: tuple[tuple[str, Any], ...]) -> tuple[float, float]:
        found = band_of([each for each in evidence if each.source != source], spread, **dict(kind))
        return math.log(found.low), math.log(found.high)

    members = defaultdict(list)
    for row, ratio in zip(rows, ratios, strict=True):
        engine = row.sample.keys["engine"]
        if not of_prior or (not row.sample.fit and engine not in UNFITTED_ENGINES):
            band = band_without(row.sample.source, tuple(row.sample.kind.items()))
            members[row.cluster].append((row.slopes, math.log(ratio), engine, band))
    return {name: Cluster(*(np.array(column) for column in zip(*own, strict=True))) for name, own in members.items()}


def prior_without(clusters: dict[Name, Cluster], source: str) -> Prior:
    """The prior from engines in clusters of other sources, without the largest source, whose network is unusual."""
    own = [
        (each.slopes, each.errors)
        for name, cluster in clusters.items()
        if name[0] not in (source, LARGEST)
        for each in cluster.by_engine().values()
        if len(each.errors) >= FEWEST_OF_PRIOR
    ]
    return prior_of(own)


def prior_of(clusters: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> Prior:
    """The prior with the greatest likelihood for the runs of many clusters.

    clusters: slopes and log errors of each cluster's runs. A cluster's runs count as at most `MOST_RUNS` runs, and a
    log error as at most `LARGEST_ERROR`.

    Source: expectation maximisation for variance components (Dempster, Rubin and Tsutakawa, JASA 1981).
    """
    variances, noise = np.full(len(FACTORS), 0.3**2), 0.1**2
    for _ in range(60):
        sums, squares, count = np.zeros(len(FACTORS)), 0.0, 0.0
        for slopes, errors in clusters:
            kept = np.clip(errors, -LARGEST_ERROR, LARGEST_ERROR)
            covariance = np.linalg.inv(slopes.T @ slopes / noise + np.diag(1 / variances))
            mean = covariance @ slopes.T @ kept / noise
            weight = min(1.0, MOST_RUNS / len(errors))
            sums += mean**2 + np.diag(covariance)
            squares += weight * float(np.sum((kept - slopes @ mean) ** 2) + np.trace(slopes @ covariance @ slopes.T))
            count += weight * len(errors)
        variances, noise = sums / len(clusters), squares / count
    return Prior(spreads=tuple(float(each) for each in np.sqrt(variances)), scatter=math.sqrt(noise))


def corrected(given: Cluster, rest: Cluster, prior: Prior) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log errors after correction by rows of the same engine, and their forecast spread (NaN if no row); (rows,)."""
    left, spread = rest.errors.copy(), np.full(len(rest.errors), np.nan)
    for engine, own in given.by_engine().items():
        found, same = posterior(own.slopes, own.errors, prior), rest.engines == engine
        left[same] -= rest.slopes[same] @ found.logs
        spread[same] = found.spread(rest.slopes[same])
    return left, spread


def median_error(logs: NDArray[np.float64]) -> float:
    """The median of |measured / forecast - 1|."""
    return float(np.median(np.abs(np.expm1(logs))))


def curve(cluster: Cluster, prior: Prior) -> list[tuple[float, float, float]]:
    """For each k: the median error of the other rows, their share inside the band, and its width; means over draws."""
    low, high = cluster.bands.T
    inside = float(np.mean((low <= cluster.errors) & (cluster.errors <= high)))
    found = [(median_error(cluster.errors), inside, math.exp(float(np.median(high - low))))]
    for k in KS[1:]:
        drawn = []
        for seed in range(DRAWS):
            order = np.random.default_rng([seed]).permutation(len(cluster.errors))
            left, spread = corrected(cluster.rows(order[:k]), cluster.rows(order[k:]), prior)
            known = ~np.isnan(spread)
            inside = float(np.mean(np.abs(left[known]) <= EIGHT_OF_TEN * spread[known]))
            width = math.exp(2 * EIGHT_OF_TEN * float(np.median(spread[known])))
            drawn.append((median_error(left), inside, width))
        error, share, width = np.mean(drawn, axis=0)
        found.append((float(error), float(share), float(width)))
    return found


def best_constant(errors: NDArray[np.float64]) -> float:
    """The least median error that one factor for all rows leaves."""
    return min(median_error(errors - log) for log in np.linspace(errors.min(), errors.max(), 400))


def main(arguments: Sequence[str]) -> None:
    """Print the curve of each cluster, the mean over them, and the prior."""
    rows = priced_runs(Path(arguments[0]) if arguments else None)
    clusters, of_prior = clusters_of(rows, of_prior=False), clusters_of(rows, of_prior=True)
    large = {name: each for name, each in clusters.items() if len(each.errors) >= FEWEST_ROWS}
    print("median error of the rest of a cluster, in percent, after k rows of it")
    print(f"{'':44}{'rows':>5}" + "".join(f"{f'k={k}':>8}" for k in KS) + f"{'constant':>10}")
    found, constants = {}, {}
    for name, cluster in sorted(large.items(), key=lambda each: -len(each[1].errors)):
        found[name], constants[name] = curve(cluster, prior_without(of_prior, name[0])), best_constant(cluster.errors)
        label = f"{name[0]}, {name[1]} x {name[2]}, {name[3]:g} GB/s"
        cells = "".join(f"{100 * each[0]:8.1f}" for each in found[name]) + f"{100 * constants[name]:10.1f}"
        print(f"{label:44}{len(cluster.errors):5}" + cells)
    means = np.mean([own for name, own in found.items() if name[0] != LARGEST], axis=0)
    constant = np.mean([own for name, own in constants.items() if name[0] != LARGEST])
    errors = [*(each[0] for each in means), constant]
    print(
        f"{f'mean, {LARGEST} apart':49}"
        + "".join(f"{100 * each:8.2f}" for each in errors[:-1])
        + f"{100 * constant:10.2f}"
    )
    print(
        f"{'of k=0':49}" + "".join(f"{each / errors[0]:8.3f}" for each in errors[:-1]) + f"{constant / errors[0]:10.3f}"
    )
    print(f"{'to reach':49}" + "".join(f"{REACH.get(k, ''):>8}" for k in KS))
    print(f"{'inside the band of 80 %':49}" + "".join(f"{each[1]:8.0%}" for each in means))
    print(f"{'high / low':49}" + "".join(f"{each[2]:8.2f}" for each in means))
    print(f"{'high / low that is shipped':49}" + "".join(f"{NARROWED[k]:8.2f}" for k in KS))
    prior = prior_without(of_prior, "")
    spreads = ", ".join(f"{name} {spread:.3f}" for name, spread in zip(FACTORS, prior.spreads, strict=True))
    print(f"\nprior of all clusters: {spreads}; scatter {prior.scatter:.3f}")
    shipped = ", ".join(map(str, PRIOR.spreads))
    print(f"prior that is shipped: {shipped}; scatter {PRIOR.scatter}")


if __name__ == "__main__":
    main(sys.argv[1:])
