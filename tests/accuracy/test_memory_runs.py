"""Bands of memory, on runs that were made up so that their distribution is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from planner.accuracy.memory_runs import MemoryRun, memory_spreads
from planner.cost.memory_band import MemoryDistribution, t_below


def made_up(rng, *, location, scale, sources=12, runs=20, between=0.0, bound=None):
    """Runs whose log ratios are t-distributed; with `bound`, two thirds only say on which side of it they are."""
    found = []
    for source in range(sources):
        middle = location + rng.normal(0, between)
        for number in range(runs):
            log = middle + scale * rng.standard_t(4)
            kind, value = "exact", log
            if bound is not None and number % 3:
                kind, value = ("above", bound) if log > bound else ("below", bound)
            found.append(MemoryRun(source=f"s{source}", engine="megatron", counter="device", kind=kind, log=value))
    return found


def test_the_distribution_is_student_s_t_with_four_degrees():
    draws = np.random.default_rng(0).standard_t(4, 200_000)
    for value in (-3.0, -1.0, 0.0, 0.5, 2.0, 4.0):
        assert t_below(value) == pytest.approx(np.mean(draws <= value), abs=0.004)
    told = MemoryDistribution(location=0.1, scale=0.2)
    for level in (0.01, 0.1, 0.5, 0.95, 0.999):
        assert told.chance(told.quantile(level)) == pytest.approx(level)
        assert np.mean(0.1 + 0.2 * draws <= math.log(told.quantile(level))) == pytest.approx(level, abs=0.004)


@pytest.mark.parametrize("bound", [None, 0.1])
def test_what_made_the_runs_is_found_again(bound):
    found = memory_spreads(made_up(np.random.default_rng(1), location=0.08, scale=0.06, runs=60, bound=bound))
    for each in found:
        assert each.counter == "device"
        assert each.location == pytest.approx(0.08, abs=0.02)
        assert each.scale == pytest.approx(0.06, rel=0.25)
    assert [each.engine for each in found] == ["megatron", None]


def test_eight_of_ten_runs_of_a_new_source_lie_inside():
    rng, shares = np.random.default_rng(2), []
    for _ in range(6):
        found = memory_spreads(made_up(rng, location=0.0, scale=0.03, sources=25, between=0.1))[-1]
        told = MemoryDistribution(location=found.location, scale=found.scale)
        new = np.exp([run.log for run in made_up(rng, location=0.0, scale=0.03, sources=300, runs=2, between=0.1)])
        shares.append(np.mean((told.quantile(0.1) <= new) & (new <= told.quantile(0.9))))
    assert np.mean(shares) == pytest.approx(0.8, abs=0.05)


def test_runs_that_ran_out_of_memory_move_the_forecast_up():
    runs = made_up(np.random.default_rng(3), location=0.0, scale=0.05)
    failed = [replace(run, source="failed", kind="above", log=0.4) for run in runs[:50]]
    before, after = memory_spreads(runs)[-1], memory_spreads([*runs, *failed])[-1]
    told = [MemoryDistribution(location=each.location, scale=each.scale) for each in (before, after)]
    assert told[1].chance(math.exp(0.4)) < told[0].chance(math.exp(0.4))
