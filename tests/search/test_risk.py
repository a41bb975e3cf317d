"""The choice of the search by the chances of fitting and of meeting a deadline, compared with every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from small_layouts import FREE, every_layout, small_job

from planner.answers.deadline import search_in_time
from planner.cost.band import axes_of, time_distribution
from planner.cost.estimate import estimate
from planner.cost.memory_band import MemoryDistribution
from planner.cost.run import longest_step_seconds
from planner.plan import Plan
from planner.search.footprint import NothingFits
from planner.search.search import search
from planner.specs.calibration import MemorySpread, Spread

SPREAD = Spread(memory=(MemorySpread(counter="device", location=0.05, scale=0.12),))


@cache
def priced(seed):
    """A small job whose limit is a chance, and every layout with its price; the forecast errors are made up."""
    job = replace(small_job(seed), headroom=None, risk=0.05, spread=SPREAD)
    return job, [(layout, estimate(job, layout)) for layout in every_layout(job)]


def chance(found):
    """The chance of the worst stage, from the peak and the memory alone."""
    return min(stage.chance_of_fitting for stage in found.memory)


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("risk", [0.01, 0.4])
def test_the_fastest_of_those_that_fit_with_the_chance_asked_for(seed, risk):
    job, layouts = priced(seed)
    fitting = [found.step_seconds for _, found in layouts if chance(found) >= 1 - risk]
    found = search(replace(job, risk=risk), FREE)
    if fitting:
        assert (found.fits, found.verdict) == (True, "fits")
        assert found.step_seconds == pytest.approx(min(fitting), rel=1e-9)
        assert found.chance_of_fitting >= 1 - risk
    else:
        assert isinstance(found, NothingFits) or not found.fits


def test_where_none_fits_the_answer_is_the_likeliest_and_below_5_percent_nothing():
    job, layouts = priced(0)
    least = min(found.peak_bytes for _, found in layouts)
    told = set()
    for share in (0.5, 0.9, 1.1):
        device = job.cluster.device.model_copy(update={"memory": least * share})
        small = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
        best = MemoryDistribution(location=0.05, scale=0.12).chance(share)
        assert best < 0.95
        found = search(small, FREE)
        if best < 0.05:
            assert isinstance(found, NothingFits)
        else:
            assert isinstance(found, Plan)
            assert (found.fits, found.verdict) == (False, "may not fit")
            assert found.chance_of_fitting == pytest.approx(best, rel=1e-6)
        told.add(type(found))
    assert len(told) == 2


def test_with_headroom_nothing_is_between_fits_and_does_not():
    job, layouts = priced(0)
    least = min(found.peak_bytes for _, found in layouts)
    device = job.cluster.device.model_copy(update={"memory": least})
    small = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
    assert search(replace(small, headroom=0.0), FREE).fits
    assert isinstance(search(replace(small, headroom=0.01), FREE), NothingFits)


@pytest.mark.parametrize("name", ["gpus", pytest.param("cost", marks=pytest.mark.slow)])
def test_a_deadline_is_kept_with_the_confidence_asked_for(name):
    job, layouts = priced(5)
    fastest = min(found.step_seconds for _, found in layouts if found.fits)

    def weight(layout, found):
        return layout.world_size * (found.step_seconds if name == "cost" else 1)

    answers = set()
    for share in (0.5, 1.1, 6.0):
        steps = 1e9 / (job.training.global_batch_size * job.training.sequence_length)
        training = job.training.model_copy(update={"tokens": 1e9, "deadline": share * fastest * steps})
        asked = replace(job, training=training)
        longest = longest_step_seconds(training)
        for confidence in (0.3, 0.8):
            longest_of = {
                axes: longest / time_distribution(asked, layout).quantile(confidence)
                for axes, layout in {axes_of(layout): layout for layout, _ in layouts}.items()
            }
            kept = [
                weight(layout, found)
                for layout, found in layouts
                if found.fits and found.step_seconds <= longest_of[axes_of(layout)]
            ]
            plan = search_in_time(asked, FREE, name, confidence=confidence)
            assert plan.run.meets_deadline == bool(kept)
            if kept:
                assert plan.run.deadline_chance >= confidence
                assert weight(plan.layout, plan) == pytest.approx(min(kept), rel=1e-9)
            answers.add(bool(kept))
    assert answers == {True, False}
