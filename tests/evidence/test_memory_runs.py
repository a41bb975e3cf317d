"""Bands of memory, on made-up runs whose distribution is known."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from project_tools import load_tool

from planner.cost.memory_band import MemoryDistribution, t_below

TOOL = load_tool("memory_runs")
MemoryRun, memory_runs, memory_spreads = TOOL.MemoryRun, TOOL.memory_runs, TOOL.memory_spreads


def made_up(rng, *, location, scale, sources=12, runs=20, between=0.0, bound=None):
    """Runs whose log ratios are t-distributed; with `bound`, two thirds only say on which side of `bound` they are."""
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


def test_the_chance_to_fit_holds_for_the_source_that_ran_out_most():
    rng, runs = np.random.default_rng(4), []
    for source, middle in enumerate((-0.02, 0.0, 0.02, 0.12)):
        for bound in rng.uniform(-0.4, 0.6, 400):  # the whole memory over the peak, of which the last source needs more
            kind = "above" if middle + 0.03 * rng.standard_t(4) > bound else "below"
            runs.append(MemoryRun(source=f"s{source}", engine="megatron", counter="needed", kind=kind, log=bound))
    runs += [replace(run, source="exact", engine="other") for run in made_up(rng, location=0.0, scale=0.02, sources=1)]
    runs += [replace(run, counter="needed") for run in runs if run.source == "exact"]
    told = [each for each in memory_spreads([run for run in runs if run.source != "s3"]) if each.counter == "needed"]
    assert all(each.scale < 0.06 for each in told)  # nothing is widened where sources are alike
    told = {each.engine: each for each in memory_spreads(runs) if each.counter == "needed"}
    others = {each.engine: each for each in memory_spreads([run for run in runs if run.source != "s3"])}["megatron"]
    factor = told["megatron"].scale / others.scale
    assert factor > 1.3
    new = [run for run in runs if run.source == "s3"]
    wide = MemoryDistribution(location=others.location, scale=told[None].scale)
    ran_out = [run.kind == "above" for run in new if wide.chance(math.exp(run.log)) >= 0.95]
    assert len(ran_out) > 50
    assert np.mean(ran_out) <= 0.06


def test_a_run_bounds_what_is_needed_by_the_whole_memory_and_a_figure_of_tensors_states_it():
    device = SimpleNamespace(memory=80.0)
    job = SimpleNamespace(cluster=SimpleNamespace(device=device), engine=SimpleNamespace(name="megatron"))

    def row(mem_class="", measured=None, *, oom=False):
        return SimpleNamespace(
            run=SimpleNamespace(source_set="s", mem_class=mem_class, oom=oom),
            setup=SimpleNamespace(job=job, assumed=()),
            predicted_memory_bytes=60.0,
            peak_bytes=64.0,
            measured_memory_bytes=measured,
            measured_seconds=None if oom else 1.0,
        )

    def read(*args, **kwargs):
        return {(run.counter, run.kind): math.exp(run.log) for run in memory_runs([row(*args, **kwargs)])}

    assert read() == {("needed", "below"): pytest.approx(80 / 64)}
    assert read(oom=True) == {("needed", "above"): pytest.approx(80 / 64)}
    assert read("allocated", 66.0) == {
        ("allocated", "exact"): pytest.approx(66 / 60),
        ("needed", "exact"): pytest.approx(70 / 64),  # 4 of the 64 are the runtime's
    }
    assert read("reserved", 66.0) == {
        ("reserved", "exact"): pytest.approx(66 / 60),
        ("needed", "below"): pytest.approx(80 / 64),  # the allocator may have kept some of it for later
    }
