"""Output of `planner calibrate`: the fitted corrections, and forecast errors before and after the fit."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from rich.text import Text

from planner.show.columns import Columns
from planner.show.screen import clean, section, stack
from planner.specs.calibration import FACTORS
from planner.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group

    from planner.evidence.fit import Forecasts, Learnt

_NOTE: Final = "forecast by the shipped calibration, by the new one, and by one that has not seen the run"
_MOST_RUNS: Final = 20


def calibrated(learnt: Sequence[Learnt]) -> Group:
    """Show corrections by device and engine, errors before and after the fit, and the runs with the largest errors."""
    runs = [forecast for each in learnt for forecast in each.forecasts]
    return stack(_corrections(learnt), _errors(runs), _runs(runs))


def _corrections(learnt: Sequence[Learnt]) -> Group:
    """Show each fitted factor as a multiple of the shipped calibration's factor, by device and engine."""
    rows = []
    for each in learnt:
        factors = [f"{getattr(each.entry, name):.2f}" for name in FACTORS]
        band = f"{each.entry.low:.2f} to {each.entry.high:.2f}"
        rows.append((clean(f"{each.entry.device}, {each.entry.engine}"), str(len(each.forecasts)), *factors, band))
    header = ("", "runs", "computing", "memory", "host", "scale-up", "network", "attention", "8 of 10 runs")
    note = "times as long as the shipped calibration says; band: of the forecast"
    columns = Columns(rows, right=range(1, 9), wrap=(0,), optional=(7, 4, 3, 1), header=header)
    single = [f"{each.entry.device}, {each.entry.engine}" for each in learnt if len(each.forecasts) == 1]
    return section("Corrections", columns, *([_one_run(single)] if single else []), note=note)


def _one_run(names: Sequence[str]) -> Text:
    """Explain that one step time does not show which part was slow, and name the runs that would."""
    words = f"One run of {' and of '.join(names)} does not tell slow computing from slow links. "
    words += "Add runs of another tp or of more hosts, or let `planner measure` time products and collectives apart."
    return Text(clean(words))


def _errors(runs: Sequence[Forecasts]) -> Group:
    rows = []
    for name, forecast in (("before", "before"), ("after", "after"), ("after, each run left out", "left_out")):
        errors = [abs(run.measured / getattr(run, forecast) - 1) for run in runs]
        rows.append((name, f"{100 * median(errors):.1f} %", f"{100 * max(errors):.1f} %"))
    note = "of |measured / forecast - 1|"
    return section("Errors of the step time", Columns(rows, right=(1, 2), header=("", "median", "largest")), note=note)


def _runs(runs: Sequence[Forecasts]) -> Group:
    rows = [
        (clean(run.where), *map(format_seconds, (run.measured, run.before, run.after, run.left_out)))
        for run in sorted(runs, key=lambda run: -abs(run.measured / run.before - 1))[:_MOST_RUNS]
    ]
    header = ("", "measured", "before", "after", "left out")
    return section("Runs", Columns(rows, right=(1, 2, 3, 4), wrap=(0,), header=header), note=_NOTE)
