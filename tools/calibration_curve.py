"""Measure, on the published runs, how much a few runs of a cluster improve the forecasts of its other layouts.

    python tools/calibration_curve.py [PRICED.pickle]

A cluster means rows with the same source, device, devices per node and line rate; only clusters with at least 20 rows
count. Rows are forecast by a fit without any run of their source. Then k random rows of the cluster (20 draws by seed)
correct the forecasts of the other rows, with `planner.accuracy.learn`. The prior is fitted to clusters of other
sources. The output is the median error of the other rows, its mean over the clusters, and the share of the other rows
inside the band. With a file name, prices are stored in this file and read again.
"""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from planner.accuracy.calibrate import (
    UNFITTED_ENGINES,
    UNFITTED_SOURCES,
    Sample,
    held_out_ratios,
    read_samples,
    source_folds,
)
from planner.accuracy.figures import LARGEST
from planner.accuracy.jobs import Unsupported, job_of
from planner.accuracy.learn import EIGHT_OF_TEN, FACTORS, PRIOR, Prior, posterior, prior_of, slopes_of
from planner.accuracy.runs import read_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.accuracy.runs import Run

ROOT: Final = Path(__file__).parents[1]
RUNS: Final = ROOT / "tests" / "published" / "measurements.csv"
KS: Final = (0, 1, 3, 5)
REACH: Final = {1: 0.75, 3: 0.6, 5: 0.5}
DRAWS: Final = 20
FEWEST_ROWS: Final = 20
FEWEST_OF_PRIOR: Final = 3
CHUNK: Final = 32


class Priced(NamedTuple):
    """A priced row with its slopes.

    cluster: source, device, devices of a node, and line rate in GB/s.
    """

    sample: Sample
    cluster: tuple[str, str, int, float]
    slopes: NDArray[np.float64]


class Cluster(NamedTuple):
    """Slopes, (rows, factors), and held-out log errors, (rows,), of a cluster.

    For a prior, they include only rows that a fit may use.
    """

    slopes: NDArray[np.float64]
    errors: NDArray[np.float64]


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


def clusters_of(rows: Sequence[Priced], *, of_prior: bool) -> dict[tuple[str, str, int, float], Cluster]:
    """Rows by cluster, forecast without their source; for a prior, without rows of unfitted sources."""
    samples = [row.sample for row in rows]
    errors = np.log(held_out_ratios(samples, source_folds(samples)))
    members = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        seen = row.sample.source not in UNFITTED_SOURCES and row.sample.keys["engine"] not in UNFITTED_ENGINES
        if seen or not of_prior:
            members[row.cluster].append((row.slopes, error))
    return {
        name: Cluster(np.array([slopes for slopes, _ in own]), np.array([error for _, error in own]))
        for name, own in members.items()
    }


def prior_without(clusters: dict[tuple[str, str, int, float], Cluster], source: str) -> Prior:
    """The prior from clusters of other sources, without the largest source, whose network no other source has."""
    own = [
        cluster
        for name, cluster in clusters.items()
        if name[0] not in (source, LARGEST) and len(cluster.errors) >= FEWEST_OF_PRIOR
    ]
    return prior_of(own)


def curve(cluster: Cluster, prior: Prior) -> list[tuple[float, float]]:
    """For each k, the other rows' median error and share inside the band, averaged over the draws."""
    found = []
    for k in KS:
        drawn = []
        for seed in range(DRAWS if k else 1):
            order = np.random.default_rng([seed]).permutation(len(cluster.errors))
            given, rest = order[:k], order[k:]
            slopes, left = cluster.slopes[rest], cluster.errors[rest]
            if k:
                known = posterior(cluster.slopes[given], cluster.errors[given], prior)
                left, spread = left - slopes @ known.logs, known.spread(slopes)
            else:
                spread = np.full(len(rest), np.inf)
            inside = np.abs(left) <= EIGHT_OF_TEN * spread
            width = np.exp(2 * EIGHT_OF_TEN * np.median(spread))
            drawn.append((np.median(np.abs(np.exp(left) - 1)), inside.mean(), width))
        found.append(tuple(np.mean(drawn, axis=0)))
    return found


def main(arguments: Sequence[str]) -> None:
    """Print the curve of each cluster, the mean over them, and the prior."""
    rows = priced_runs(Path(arguments[0]) if arguments else None)
    clusters, of_prior = clusters_of(rows, of_prior=False), clusters_of(rows, of_prior=True)
    large = {name: each for name, each in clusters.items() if len(each.errors) >= FEWEST_ROWS}
    print("median error of the rest of a cluster, in percent, after k rows of it")
    print(f"{'':44}{'rows':>5}" + "".join(f"{f'k={k}':>8}" for k in KS))
    found = {}
    for name, cluster in sorted(large.items(), key=lambda each: -len(each[1].errors)):
        found[name] = curve(cluster, prior_without(of_prior, name[0]))
        label = f"{name[0]}, {name[1]} x {name[2]}, {name[3]:g} GB/s"
        print(f"{label:44}{len(cluster.errors):5}" + "".join(f"{100 * each[0]:8.1f}" for each in found[name]))
    means = np.mean([own for name, own in found.items() if name[0] != LARGEST], axis=0)
    print(f"{f'mean, {LARGEST} apart':49}" + "".join(f"{100 * each[0]:8.2f}" for each in means))
    print(f"{'of k=0':49}" + "".join(f"{each[0] / means[0][0]:8.3f}" for each in means))
    print(f"{'to reach':49}" + "".join(f"{REACH.get(k, ''):>8}" for k in KS))
    print(f"{'inside the band of 80 %':57}" + "".join(f"{each[1]:8.0%}" for each in means[1:]))
    print(f"{'high / low':57}" + "".join(f"{each[2]:8.2f}" for each in means[1:]))
    prior = prior_without(of_prior, "")
    spreads = ", ".join(f"{name} {spread:.3f}" for name, spread in zip(FACTORS, prior.spreads, strict=True))
    print(f"\nprior of all clusters: {spreads}; scatter {prior.scatter:.3f}")
    shipped = ", ".join(map(str, PRIOR.spreads))
    print(f"prior that is shipped: {shipped}; scatter {PRIOR.scatter}")


if __name__ == "__main__":
    main(sys.argv[1:])
