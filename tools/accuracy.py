"""Write docs/accuracy.md, and the table of README.md, from the published runs (`make accuracy`).

With `--figures` it prints the figures that a change of the cost model is judged by, and writes nothing.

Folds hold whole model sizes out (hidden size and layers together), then whole sources: what they forecast, the fit has
not seen. Errors are |measured / predicted - 1| of the step time.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.accuracy.calibrate import evidence_of, fitted_ratios, held_out_ratios, read_samples
from planner.accuracy.figures import figures, hold_out, to_text
from planner.accuracy.report import report_of
from planner.accuracy.runs import read_runs
from planner.cost.band import band_of, spread_of
from planner.search.near_ties import NEAR_TIE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from planner.accuracy.calibrate import Sample
    from planner.accuracy.report import Report
    from planner.accuracy.runs import Run

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "accuracy.md", ROOT / "README.md"
BEGIN, END = "<!-- accuracy: written by `make accuracy` -->", "<!-- accuracy: end -->"
WORST = 30

HEAD = """# How accurate forecasts are

<!-- written by `make accuracy`; edit tools/accuracy.py instead -->

Forecasts against {num_runs} published runs of other programs (`tests/published/measurements.csv` names
every source). {num_priced} of the {num_measured} that were measured can be priced.

- An error is |measured / predicted - 1| of the step time, in percent: median / mean / 90th percentile. Rates in FLOP/s
  are never compared, because sources count them in ways that differ by a third.
- *Held out by size*: forecast by a fit without any run of the same hidden size and number of layers, in five folds.
  *By source*: without any run of the same source. *Fitted*: by the fit of all runs, as it is shipped.
- Fitted are factors for device, engine, precision and kind of layers, never one for a model. The tables of Narayanan et
  al. (SC 2021) and Korthikanti et al. (2022) enter no fit.
- What a row does not state takes the framework's default; a row whose recompute is not stated recomputes as much as it
  takes to fit.
"""

SWEEPS = """In {} sweeps of one job the layout that the planner calls best is {:.1f} % slower than the best that was
measured; one drawn by chance is {:.1f} % slower. Of the pairs that differ by more than 3 %, {} of {} ({:.0%})
are in the right order; by what was predicted, {} of the {} pairs that are less than {:.0%} apart (near ties) and {} of
the {} others. A layout that was run several times counts once, by its median: repeated runs on the V100
cluster differ by up to 1.7 times."""

BANDS = """A band is meant to hold 8 of 10 runs. With the fold of a run left out of the evidence it holds {:.0%} of the
runs by size, and {:.0%} by source."""

PEERS = """
## Other cost models on the same rows

As run on the rows that each can price, with one constant for each GPU and precision fitted on the same rows, so in
their favour; a run of each was checked against the figures that it publishes.

| model | rows | median / mean / p90 |
|---|---|---|
| Calculon | 267 | 9.8 / 15.2 / 33.2 |
| llm-analysis | 596 | 23.0 / 37.9 / 73.1 |
| SimuMax | 436 | 9.6 / 14.0 / 29.7 |
"""


class Scored(NamedTuple):
    """Measured over predicted of every sample, three times; shape (samples,)."""

    samples: Sequence[Sample]
    runs: dict[str, Run]
    by_size: NDArray[np.float64]
    by_source: NDArray[np.float64]
    fitted: NDArray[np.float64]


def kind(sample: Sample) -> str:
    """How a run is cut, in the groups of the README."""
    if sample.keys["experts"]:
        return "experts"
    if "cp" in sample.axes:
        return "context parallel"
    if "fsdp" in sample.axes:
        return "FSDP and ZeRO-3"
    return "data parallel alone" if sample.axes == "dp" else "dense, tensor and pipeline parallel"


def score(path: Path) -> Scored:
    """Read, price and forecast every run of a table."""
    runs = {run.id: run for run in read_runs(path)}
    samples = read_samples(runs.values())
    sources = sorted({sample.source for sample in samples})
    return Scored(
        samples=samples,
        runs=runs,
        by_size=held_out_ratios(samples, [sample.fold for sample in samples]),
        by_source=held_out_ratios(samples, [sources.index(sample.source) for sample in samples]),
        fitted=fitted_ratios(samples),
    )


def coverage(scored: Scored, ratios: NDArray[np.float64], folds: Sequence[int | str]) -> float:
    """Share of runs inside their band, where no run of the same fold counts as evidence."""
    inside = 0
    for fold in set(folds):
        others = [i for i, own in enumerate(folds) if own != fold]
        evidence = evidence_of([scored.samples[i] for i in others], ratios[others])
        for i, own in enumerate(folds):
            if own == fold:
                sample = scored.samples[i]
                found = band_of(evidence, spread_of(evidence), **sample.kind)
                inside += found.low <= ratios[i] <= found.high
    return inside / len(folds)


def three(ratios: NDArray[np.float64]) -> str:
    """Median, mean and 90th percentile in percent."""
    errors = 100 * np.abs(ratios - 1)
    return f"{np.median(errors):.1f} / {errors.mean():.1f} / {np.quantile(errors, 0.9):.1f}"


def table(scored: Scored, name: str, key: Callable[[Sample], str], *, everything: bool = False) -> list[str]:
    """Errors by the groups of one key, largest group first."""
    found = [key(sample) for sample in scored.samples]
    values = sorted(set(found), key=lambda value: (-found.count(value), value))
    lines = [f"| {name} | runs | held out by size | held out by source | fitted |", "|---|---|---|---|---|"]
    for value in [*(["all"] if everything else []), *values]:
        mask = np.array([value in ("all", own) for own in found])
        cells = [three(ratios[mask]) for ratios in (scored.by_size, scored.by_source, scored.fitted)]
        lines.append(f"| {value} | {mask.sum()} | {' | '.join(cells)} |")
    return lines


def worst(scored: Scored) -> list[str]:
    """The runs that are furthest off when their size is held out."""
    lines = [
        "| run | source | model | devices | axes | measured / predicted | not stated |",
        "|---|---|---|---|---|---|---|",
    ]
    for i in np.argsort(-np.abs(scored.by_size - 1))[:WORST]:
        sample = scored.samples[i]
        run = scored.runs[sample.run]
        unstated = "" if run.recompute_policy else "recompute"
        cells = (
            run.id,
            sample.source,
            run.model,
            f"{run.gpus} {run.gpu}",
            sample.axes,
            f"{scored.by_size[i]:.2f}",
            unstated,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sweeps(report: Report) -> list[str]:
    """How well the layouts that one source tried are ranked."""
    found = report.sweeps
    pairs, ordered = (sum(getattr(sweep, name) for sweep in found) for name in ("clear_pairs", "ordered_pairs"))
    regret, chance = (100 * float(np.mean([getattr(s, name) for s in found])) for name in ("regret", "random_regret"))
    near, near_right, apart, apart_right = (
        sum(getattr(sweep, name) for sweep in found)
        for name in ("near_pairs", "ordered_near_pairs", "apart_pairs", "ordered_apart_pairs")
    )
    ranked = ordered, pairs, ordered / pairs, near_right, near, NEAR_TIE, apart_right, apart
    return textwrap.wrap(SWEEPS.format(len(found), regret, chance, *ranked), 118)


def page(scored: Scored, report: Report) -> str:
    """The whole of docs/accuracy.md."""
    size_folds = [sample.fold for sample in scored.samples]
    sources = [sample.source for sample in scored.samples]
    inside = coverage(scored, scored.by_size, size_folds), coverage(scored, scored.by_source, sources)
    measured = sum(run.measured_step_seconds is not None for run in scored.runs.values())
    parts = [
        HEAD.format(num_runs=len(scored.runs), num_priced=len(scored.samples), num_measured=measured),
        f"## Worst runs, by size held out\n\n{_lines(worst(scored))}\n",
        f"## By how the run is cut\n\n{_lines(table(scored, 'cut', kind, everything=True))}\n",
        *(
            f"## By {name}\n\n{_lines(table(scored, name, key))}\n"
            for name, key in (
                ("source", lambda sample: sample.source),
                ("device", lambda sample: str(sample.keys["device"])),
                ("engine", lambda sample: str(sample.keys["engine"])),
                ("precision", lambda sample: str(sample.keys["precision"])),
                ("architecture", lambda sample: scored.runs[sample.run].arch or "not stated"),
                ("axes", lambda sample: sample.axes),
            )
        ),
        f"## Choosing among layouts\n\n{_lines(sweeps(report))}\n",
        f"## Error bands\n\n{_lines(textwrap.wrap(BANDS.format(*inside), 118))}",
    ]
    return "\n".join(parts).rstrip("\n") + "\n" + PEERS


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def readme_table(scored: Scored) -> str:
    """The table of README.md between its two marks."""
    return _lines([BEGIN, *table(scored, "cut", kind, everything=True), END])


def main(arguments: Sequence[str]) -> None:
    """Write both from a table of runs."""
    path = Path(arguments[-1])
    if arguments[0] == "--figures":
        sys.stdout.write(to_text(figures(hold_out(read_runs(path), processes=2))))
        return
    scored = score(path)
    PAGE.write_text(page(scored, report_of(path)), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + readme_table(scored) + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)} and the table of {README.name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
