"""Measure ranking: whether the planner would have chosen the best of the layouts that a source ran on one job."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Final

from planner.search.near_ties import near_tie
from planner.sums import sum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from planner.evidence.compare.score import Row

CLEAR: Final = 0.03
"""Published layouts whose times differ by less than this share count as equal; repeated runs differ by as much."""
_FEWEST: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Layouts of one model, device, number of devices, batch, release and kernels in one source.

    regret: measured time of the layout with the best prediction, divided by the best measured time, minus 1.
    random_regret: the mean regret of a random layout.
    clear_pairs: number of pairs whose measured times differ by more than `CLEAR`.
    ordered_pairs: number of these pairs that are predicted in the right order.
    near_pairs, ordered_near_pairs: the same numbers for pairs whose predictions are a near tie.
    apart_pairs, ordered_apart_pairs: the same numbers for all other pairs.
    """

    source: str
    job: str
    num_rows: int
    regret: float
    random_regret: float
    clear_pairs: int
    ordered_pairs: int
    near_pairs: int
    ordered_near_pairs: int
    apart_pairs: int
    ordered_apart_pairs: int


def sweeps(rows: Iterable[Row]) -> tuple[Sweep, ...]:
    """Every sweep of at least three different layouts, by seconds per sequence.

    Batches of one sweep may differ slightly, so that each layout divides its batch. Repeated runs of a layout have the
    same forecast, so they count once, by their median; on a shared network their times differ by a factor of up to 1.7.
    """
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
    for row in rows:
        if row.setup is None or not row.measured_seconds or not row.predicted_seconds or not row.run.gbs:
            continue
        run, sequences = row.run, row.run.gbs
        rounded = round(2 ** (round(4 * math.log2(sequences)) / 4))  # so that 2016 and 2048 sequences count as one job
        size = f"{run.gpus} x {run.gpu}, batch {rounded}, sequence {run.seq}"
        shape = f"{run.model} ({run.layers} layers of {run.hidden}, {run.heads} heads)"
        program = f"{run.release}{'' if run.flash_attention != 0 else ', unfused attention'}"
        job = f"{shape} on {size}, {row.setup.job.training.precision} {program}".strip()
        measured, predicted = row.measured_seconds / sequences, row.predicted_seconds / sequences
        groups[run.source_set, job].append((measured, predicted, str(row.setup.layout)))
    return tuple(
        _sweep(source, job, distinct)
        for (source, job), members in sorted(groups.items())
        if len(distinct := _distinct(members)) >= _FEWEST
    )


def _distinct(members: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """One member for each layout: medians of its measured and its predicted seconds."""
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for measured, predicted, layout in members:
        runs[layout].append((measured, predicted))
    return [
        (median(measured for measured, _ in own), median(predicted for _, predicted in own), layout)
        for layout, own in runs.items()
    ]


def _sweep(source: str, job: str, members: Sequence[tuple[float, float, str]]) -> Sweep:
    measured = [each[0] for each in members]
    predicted = [each[1] for each in members]
    best = min(measured)
    chosen = min(zip(predicted, measured, strict=True))[1]
    pairs = [(a[:2], b[:2]) for a, b in combinations(members, 2)]
    clear = [(a, b) for a, b in pairs if max(a[0], b[0]) > (1 + CLEAR) * min(a[0], b[0])]
    near = [(a, b) for a, b in pairs if near_tie(a[1], b[1])]
    return Sweep(
        source=source,
        job=job,
        num_rows=len(members),
        regret=chosen / best - 1,
        random_regret=sum_of(measured) / len(measured) / best - 1,
        clear_pairs=len(clear),
        ordered_pairs=sum(map(_in_order, clear)),
        near_pairs=len(near),
        ordered_near_pairs=sum(map(_in_order, near)),
        apart_pairs=len(pairs) - len(near),
        ordered_apart_pairs=sum(map(_in_order, pairs)) - sum(map(_in_order, near)),
    )


def _in_order(pair: tuple[tuple[float, float], tuple[float, float]]) -> bool:
    """Whether the predicted order of two layouts equals their measured order."""
    (measured, predicted), (other_measured, other_predicted) = pair
    return (measured < other_measured) == (predicted < other_predicted) and predicted != other_predicted
