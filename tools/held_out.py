"""Errors of the calibrated model on runs that the fit has not seen (part of `make accuracy`).

Folds hold whole model sizes out (hidden size and layers together), then whole sources. Errors are
|measured / predicted - 1|.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from planner.accuracy.calibrate import held_out_ratios, read_samples
from planner.accuracy.runs import read_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from planner.accuracy.calibrate import Sample


def kind(sample: Sample) -> str:
    """The group that the targets of the project speak of."""
    axes = sample.axes
    if sample.keys["experts"]:
        return "experts"
    if axes["cp"] > 1:
        return "context parallel"
    if axes["zero"] >= 2:
        return "FSDP / ZeRO-3"
    return "dense 3D" if axes["tp"] * axes["pp"] > 1 else "data parallel"


def summary(ratios: NDArray[np.float64]) -> tuple[str, str, str, str]:
    """Number of runs, and median, mean and 90th percentile of the error in percent."""
    errors = np.abs(ratios - 1) * 100
    figures = (np.median(errors), errors.mean(), np.quantile(errors, 0.9))
    median, mean, p90 = (f"{figure:.1f}" for figure in figures)
    return str(len(errors)), median, mean, p90


def main(arguments: Sequence[str]) -> None:
    """Print both kinds of folds for a table of runs."""
    samples = read_samples(read_runs(Path(arguments[0])))
    by_size = held_out_ratios(samples, [sample.fold for sample in samples])
    sources = sorted({sample.source for sample in samples})
    by_source = held_out_ratios(samples, [sources.index(sample.source) for sample in samples])
    table = Table("runs", "n", "median %", "mean %", "p90 %", "median %", "mean %", "p90 %")
    table.title = "held out: whole model sizes | whole sources"
    for name in ("all", *sorted({kind(sample) for sample in samples})):
        mask = np.array([name in ("all", kind(sample)) for sample in samples])
        table.add_row(name, *summary(by_size[mask]), *summary(by_source[mask])[1:])
    Console(width=100).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
