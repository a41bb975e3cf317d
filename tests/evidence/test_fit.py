"""Corrections learnt from a user's own runs, on made-up runs for which the right answer is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from project_tools import load_tool

from planner.answers.plan_inputs import job_of
from planner.api import estimate_layout
from planner.evidence.fit import (
    FACTORS,
    Prior,
    learn,
    learn_calibration,
    posterior,
    regression,
    slopes_of,
)
from planner.evidence.rows.observation import Observation
from planner.made_by import with_corrections
from planner.reading import corrected
from planner.show.calibrate import calibrated
from planner.show.screen import Screen, to_text
from planner.specs.by_name import shipped_calibration

LAYOUTS = ("dp=8,zero=1,mbs=1", "tp=2,dp=4,mbs=1", "tp=4,dp=2,mbs=2", "pp=2,dp=4,mbs=1")


@pytest.fixture(scope="module")
def plans():
    ask = {"gpus": 8, "seq_len": 2048, "global_batch": 64, "engine": "megatron"}
    return [estimate_layout("llama3-8b", "dgx-a100", layout=layout, **ask) for layout in LAYOUTS]


def observed(plan, times):
    return Observation(where=f"{plan.layout}", job=job_of(plan).pools[0], layout=plan.layout, measured_seconds=times)


def slower(plans, factor):
    return [observed(plan, plan.step_seconds * factor) for plan in plans]


def test_the_regression_is_least_squares_with_a_row_for_each_prior():
    """Oracle: a prior is a run whose error is 0, whose slope is 1 for its factor, and whose weight is its precision."""
    rng = np.random.default_rng(0)
    slopes, errors = rng.normal(size=(9, 3)), rng.normal(size=9)
    precision, weights = rng.uniform(0.1, 5.0, (4, 3)), rng.uniform(0.1, 5.0, (4, 9))
    means, covariances = regression(slopes, errors, precision, weights)
    for mean, covariance, own, weight in zip(means, covariances, precision, weights, strict=True):
        scales = np.sqrt([*weight, *own])
        rows = np.concatenate([slopes, np.eye(3)]) * scales[:, None]
        assert mean == pytest.approx(np.linalg.lstsq(rows, np.append(errors, np.zeros(3)) * scales)[0])
        assert np.linalg.pinv(rows) @ np.linalg.pinv(rows).T == pytest.approx(covariance)


def test_no_run_changes_nothing_and_few_runs_move_less_than_many(plans):
    factors = [learn(slower(plans[:1] * count, 1.3))[0].forecasts[0] for count in (1, 2, 6)]
    moved = [math.log(each.after / each.before) / math.log(1.3) for each in factors]
    assert 0 < moved[0] < moved[1] < moved[2] < 1
    assert moved[2] > 0.7


def test_runs_as_forecast_leave_the_corrections(plans):
    (found,) = learn(slower(plans, 1.0))
    assert found.entry.slowdown == pytest.approx(1.0, abs=1e-3)


def test_one_wild_run_does_not_carry_the_others_away(plans):
    runs = [*slower(plans[:2] * 3, 1.0), *slower(plans[:1], 20.0)]
    tame = [*slower(plans[:2] * 3, 1.0), *slower(plans[:1], 1.5)]
    wild, less = (learn(own)[0].forecasts[1].after / plans[1].step_seconds for own in (runs, tame))
    assert wild == pytest.approx(less, rel=0.02)
    assert wild < 1.06


@pytest.mark.slow
def test_left_out_is_the_fit_of_the_others(plans):
    """Oracle: a new fit without the run; its slopes are taken at other factors."""
    runs = [
        replace(run, measured_seconds=run.measured_seconds * factor)
        for run, factor in zip(slower(plans, 1.0), (1.1, 1.3, 1.2, 1.15), strict=True)
    ]
    (found,) = learn(runs)
    for index, run in enumerate(runs):
        calibration, _ = learn_calibration([*runs[:index], *runs[index + 1 :]])
        seconds = corrected(plans[index], calibration).step_seconds
        assert found.forecasts[index].left_out == pytest.approx(seconds, rel=0.05), run.where


def test_the_file_forecasts_what_was_printed(plans):
    calibration, (found,) = learn_calibration(slower(plans, 1.4))
    for plan, forecast in zip(plans, found.forecasts, strict=True):
        again = corrected(plan, calibration)
        assert again.step_seconds == pytest.approx(forecast.after, rel=1e-4)
        assert again.made_by.calibration == "own"
        assert again.low_step_seconds < forecast.measured * 1.05
    assert with_corrections(job_of(plans[0]), shipped_calibration()).pools[0].calibration == plans[0].calibration[0]


def test_what_one_run_teaches_is_not_known_without_it(plans):
    (found,) = learn(slower(plans[:1], 6.0))
    assert found.forecasts[0].left_out == pytest.approx(plans[0].step_seconds)
    assert found.forecasts[0].after > 1.1 * plans[0].step_seconds


def test_bands_narrow_with_runs(plans):
    widths = [
        entry.high / entry.low for count in (1, 2, 5) for entry in [learn(slower(plans * count, 1.1)[:count])[0].entry]
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_each_device_and_engine_learns_by_itself(plans):
    other = estimate_layout(
        "llama3-8b", "dgx-h100", layout=LAYOUTS[0], gpus=8, seq_len=2048, global_batch=64, engine="megatron"
    )
    slow, fast = learn([*slower(plans, 1.5), observed(other, other.step_seconds * 0.9)])
    assert (slow.entry.device, fast.entry.device) == ("a100-80gb", "h100-80gb")
    assert slow.entry.slowdown > 1 > fast.entry.slowdown


# --- the regression, without prices ---------------------------------------------------------------------------------


def made_up(truth, count, scatter, seed=3):
    """Slopes like those of runs on several hosts, and the log errors that these true factors cause."""
    random = np.random.default_rng(seed)
    slopes = random.dirichlet((6, 1, 2, 1, 1, 0.5), count)
    return slopes, slopes @ np.array(truth) + scatter * random.standard_normal(count)


def test_factors_are_found_where_runs_tell_them_apart() -> None:
    truth = (0.2, 0.0, 0.6, 0.0, 0.0, 0.0)
    found = posterior(*made_up(truth, 400, 0.01))
    assert found.logs[[0, 2]] == pytest.approx((0.2, 0.6), abs=0.1)
    assert found.scatter < 0.1


def test_the_posterior_is_that_of_the_textbook() -> None:
    """Oracle: with one value for share and scatter, the posterior is ridge regression, here by its normal equations."""
    slopes, errors = made_up((0.1, 0.2, -0.1, 0.3, 0.0, 0.1), 7, 0.05)
    prior = Prior(spreads=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), scatter=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.evidence.fit._SHARES", (1.0,))
        patch.setattr("planner.evidence.fit._SCATTERS", (1.0,))
        found = posterior(slopes, errors, prior)
    precision = slopes.T @ slopes / 0.05**2 + np.diag(1 / np.square(prior.spreads))
    assert found.logs == pytest.approx(np.linalg.solve(precision, slopes.T @ errors / 0.05**2))
    assert found.covariance == pytest.approx(np.linalg.inv(precision), abs=1e-9)


def test_the_prior_of_many_clusters_is_what_they_were_made_of() -> None:
    random = np.random.default_rng(1)
    spreads = np.array([0.1, 0.5, 0.3, 0.4, 0.2, 0.3])
    clusters = [made_up(spreads * random.standard_normal(6), 60, 0.03, seed) for seed in range(150)]
    found = load_tool("calibration_curve").prior_of(
        [(slopes, np.clip(errors, -0.4, 0.4)) for slopes, errors in clusters]
    )
    assert found.scatter == pytest.approx(0.03, rel=0.1)
    assert found.spreads == pytest.approx(spreads, rel=0.25)


def test_every_factor_makes_what_it_names_slower(plans) -> None:
    job, layout = job_of(plans[1]).pools[0], plans[1].layout
    slopes = dict(zip(FACTORS, slopes_of(job, layout), strict=True))
    assert sum(slopes.values()) == pytest.approx(1.0, abs=0.2)  # computing has some of memory and host in it
    assert slopes["slowdown"] > slopes["scale_up"] > 0
    assert slopes["network"] == 0  # one host


def test_shares_and_scatters_are_averaged_by_their_likelihood() -> None:
    """Oracle: the density of the errors under each pair, as a normal distribution over the runs themselves."""
    slopes, errors = made_up((0.1, 0.2, -0.1, 0.3, 0.0, 0.1), 5, 0.05)
    prior = Prior(spreads=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), scatter=0.05)
    total, weighted = 0.0, np.zeros(6)
    for share, scatter in itertools.product((0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (0.7, 1.0, 1.4, 2.0, 2.8, 4.0)):
        spread = np.diag(share * np.square(prior.spreads))
        covariance = slopes @ spread @ slopes.T + (scatter * prior.scatter) ** 2 * np.eye(5)
        apart = np.linalg.solve(covariance, errors)
        density = math.exp(-errors @ apart / 2) / math.sqrt(np.linalg.det(covariance))
        total, weighted = total + density, weighted + density * (spread @ slopes.T @ apart)
    assert posterior(slopes, errors, prior).logs == pytest.approx(weighted / total)


def test_figures_of_corrections_stand_below_their_names(plans) -> None:
    lines = to_text(calibrated(learn(slower(plans, 1.3))), Screen(width=160)).splitlines()
    place = next(place for place, line in enumerate(lines) if "computing" in line and "scale-up" in line)
    names, figures = lines[place : place + 2]
    for name in ("runs", "computing", "memory", "host", "scale-up", "network"):
        end = names.index(name) + len(name)
        assert figures[end - 1].isdigit(), name
        assert figures[end : end + 1].strip() == "", name
