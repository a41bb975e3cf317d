"""What runs of one's own teach, on runs that were made up so that the right answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.accuracy.learn import Observation, learn, learn_calibration
from planner.api import estimate_layout
from planner.explain.plan_inputs import job_of
from planner.made_by import with_corrections
from planner.reading import corrected
from planner.specs.by_name import shipped_calibration

LAYOUTS = ("dp=8,zero=1,mbs=1", "tp=2,dp=4,mbs=1", "tp=4,dp=2,mbs=2", "pp=2,dp=4,mbs=1", "tp=2,pp=2,dp=2,mbs=1")


@pytest.fixture(scope="module")
def plans():
    ask = {"gpus": 8, "seq_len": 2048, "global_batch": 64, "engine": "megatron"}
    return [estimate_layout("llama3-8b", "dgx-a100", layout=layout, **ask) for layout in LAYOUTS]


def observed(plan, times):
    return Observation(where=f"{plan.layout}", job=job_of(plan).pools[0], layout=plan.layout, measured_seconds=times)


def slower(plans, factor):
    return [observed(plan, plan.step_seconds * factor) for plan in plans]


def test_no_run_changes_nothing_and_few_runs_move_less_than_many(plans):
    factors = [learn(slower(plans[:1] * count, 1.3))[0].forecasts[0] for count in (1, 3, 30)]
    moved = [math.log(each.after / each.before) / math.log(1.3) for each in factors]
    assert 0 < moved[0] < moved[1] < moved[2] < 1
    assert moved[2] > 0.85


def test_runs_as_forecast_leave_the_corrections(plans):
    (found,) = learn(slower(plans, 1.0))
    assert found.entry.slowdown == pytest.approx(1.0, abs=1e-3)


def test_one_wild_run_does_not_carry_the_others_away(plans):
    runs = [*slower(plans * 4, 1.0), *slower(plans[:1], 20.0)]
    assert learn(runs)[0].forecasts[1].after == pytest.approx(plans[1].step_seconds, rel=0.03)


def test_left_out_is_the_fit_of_the_others(plans):
    """Oracle: the fit again, without the run."""
    runs = [
        replace(run, measured_seconds=run.measured_seconds * factor)
        for run, factor in zip(slower(plans, 1.0), (1.1, 1.3, 1.2, 1.15, 1.25), strict=True)
    ]
    (found,) = learn(runs)
    for index, run in enumerate(runs):
        calibration, _ = learn_calibration([*runs[:index], *runs[index + 1 :]])
        seconds = corrected(plans[index], calibration).step_seconds
        assert found.forecasts[index].left_out == pytest.approx(seconds, rel=0.005), run.where


def test_the_file_forecasts_what_was_printed(plans):
    calibration, (found,) = learn_calibration(slower(plans, 1.4))
    for plan, forecast in zip(plans, found.forecasts, strict=True):
        again = corrected(plan, calibration)
        assert again.step_seconds == pytest.approx(forecast.after, rel=1e-4)
        assert again.made_by.calibration == "own"
        assert again.low_step_seconds < forecast.measured * 1.05
    assert with_corrections(job_of(plans[0]), shipped_calibration()).pools[0].calibration == plans[0].calibration[0]


def test_bands_narrow_with_runs(plans):
    widths = [
        entry.high / entry.low for count in (1, 5, 30) for entry in [learn(slower(plans * count, 1.1)[:count])[0].entry]
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_each_device_and_engine_learns_by_itself(plans):
    other = estimate_layout(
        "llama3-8b", "dgx-h100", layout=LAYOUTS[0], gpus=8, seq_len=2048, global_batch=64, engine="megatron"
    )
    slow, fast = learn([*slower(plans, 1.5), observed(other, other.step_seconds * 0.9)])
    assert (slow.device, fast.device) == ("a100-80gb", "h100-80gb")
    assert slow.entry.slowdown > 1 > fast.entry.slowdown
