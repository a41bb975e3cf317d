"""The figures that judge a change: no row is forecast from its own source, and the sums equal the sums of the rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from project_tools import load_tool
from published_runs import published_runs

from planner.cost.band import Band

ROOT = Path(__file__).parents[2]
EVERY = 60

FIGURES = load_tool("accuracy_figures")


@pytest.fixture(scope="module", autouse=True)
def priced_once():
    """A setup has the same step times whatever was measured, so rows that a test changes are not priced again."""
    calibrate, known = sys.modules[FIGURES.read_samples.__module__], []
    honest = calibrate._seconds

    def seconds(setup):
        found = next((each for own, each in known if own == setup), None)
        if found is None:
            known.append((setup, found := honest(setup)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_seconds", seconds)
        yield


@pytest.fixture(scope="module")
def runs():
    return published_runs()[::EVERY]


@pytest.fixture(scope="module")
def held(runs):
    return FIGURES.hold_out(runs)


def test_a_row_is_never_forecast_from_its_own_family(runs, held):
    """The rows of one source become twice as slow: no forecast of the family's other sources learns from it."""
    source, family = "megatron-bridge", "nvidia-bridge"
    assert len({run.source_set for run in runs if run.family == family}) > 1
    slower = FIGURES.hold_out(
        [
            replace(run, measured_step_s=2 * seconds)
            if run.source_set == source and (seconds := run.measured_step_seconds)
            else run
            for run in runs
        ]
    )
    for before, after in zip(held.rows, slower.rows, strict=True):
        same = before.predicted_seconds == after.predicted_seconds
        assert same or before.run.family != family
    changed = [a.predicted_seconds != b.predicted_seconds for a, b in zip(held.rows, slower.rows, strict=True)]
    assert any(changed), "forecasts of other families learn from it"


def test_pooled_errors_are_those_of_the_rows(held):
    errors = sorted(
        100 * abs(row.error) for row in held.rows if row.error is not None and row.run.source_set != FIGURES.LARGEST
    )
    found = {figure.name: figure for figure in FIGURES.figures(held)}[f"all but {FIGURES.LARGEST}, pooled"]
    assert found.num_rows == len(errors)
    middle, mean, ninth = map(float, found.value.split(" / "))
    assert mean == pytest.approx(sum(errors) / len(errors), abs=0.05)
    assert middle == pytest.approx(np.median(errors), abs=0.05)
    assert ninth == pytest.approx(errors[int(0.9 * (len(errors) - 1))], abs=0.05)


def test_the_text_has_a_line_for_each_figure(held):
    found = FIGURES.figures(held)
    lines = FIGURES.to_text(found).splitlines()[1:]
    assert [line.split("  ")[0].strip() for line in lines] == [figure.name for figure in found]
    assert "nan" not in FIGURES.to_text(found)


@pytest.fixture(scope="module")
def tool():
    return load_tool("accuracy")


@pytest.fixture(scope="module")
def scored(tool, runs, held):
    fitted = np.ones(len(held.samples))
    return tool.Scored(held=held, runs={run.id: run for run in runs}, fitted=fitted)


def test_the_page_leads_with_families_held_out_and_its_tables_are_whole(tool, scored):
    page = tool.page(scored)
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles[0] == "## By how the run is cut"
    cells = next(line for line in page.splitlines() if line.startswith("| all | ")).split(" | ")
    errors = 100 * np.abs(scored.held.ratios - 1)
    middle, mean, ninth = map(float, cells[2].split(" / "))
    assert (middle, mean) == (pytest.approx(np.median(errors), abs=0.05), pytest.approx(errors.mean(), abs=0.05))
    assert ninth == pytest.approx(np.quantile(errors, 0.9), abs=0.05)
    for absent in ("fine-tune", "adapters", "consumer card", "AMD"):
        assert absent in page.split("## ")[0]
    for family in {run.family for run in scored.runs.values()} & {sample.family for sample in scored.samples}:
        assert f"\n| {family} | " in page
    assert "nan" not in page.lower().split()
    for section in page.split("## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        assert len({line.replace("\\\\|", "").count("|") for line in lines[:2]}) <= 1, section.splitlines()[0]
    for source in {sample.source for sample in scored.samples}:
        assert f"\n| {source} | " in page
    for source in {run.source_set for run in scored.runs.values() if run.fit}:
        assert f"`{source}`" in page.split("## ")[0]


def test_groups_come_worst_first(tool, scored):
    rows = tool.table(scored, "source", lambda sample: sample.source)[2:]
    medians = [float(row.split(" | ")[2].split(" / ")[0]) for row in rows]
    assert medians == sorted(medians, reverse=True)


def test_a_miss_outside_the_band_costs_ten_times_its_length(tool):
    band = Band(low=0.8, high=1.25)
    assert tool.interval_score(band, 1.0) == pytest.approx(np.log(1.25 / 0.8))
    assert tool.interval_score(band, 2.5) == pytest.approx(np.log(1.25 / 0.8) + 10 * np.log(2))
    assert tool.interval_score(band, 0.4) == pytest.approx(np.log(1.25 / 0.8) + 10 * np.log(2))
