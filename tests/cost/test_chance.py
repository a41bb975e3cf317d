"""The chance of fitting compared with draws of the error, and with an integral of the published density."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from planner.cost.chance import chance_of_fitting, largest_peak_bytes, spread_for, spread_of
from planner.cost.estimate import memory_of_stages
from planner.cost.ledger import verdict_of
from planner.cost.memory_band import MemoryDistribution
from planner.layout_text import parse_layout
from planner.specs.calibration import MemorySpread, Spread

_SPREAD = MemoryDistribution(location=-0.03, scale=0.08)


def below(value):
    """Probability that Student's t with 4 degrees of freedom is below a value: the integral of 3/8 (1 + x^2/4)^-2.5."""
    x = np.linspace(0, value, 200_001)
    density = 0.375 * (1 + x**2 / 4) ** -2.5
    return 0.5 + np.sum((density[1:] + density[:-1]) / 2 * np.diff(x))


def test_the_chance_is_that_of_draws_of_the_error():
    peaks, whole = np.array([60e9, 75e9, 79e9, 82e9, 90e9]), 80e9
    draws = np.exp(-0.03 + 0.08 * np.random.default_rng(0).standard_t(4, size=400_000))
    found = chance_of_fitting(peaks, whole, _SPREAD)
    assert found == pytest.approx([np.mean(draws * peak <= whole) for peak in peaks], abs=0.004)
    assert found == pytest.approx([below((math.log(whole / peak) + 0.03) / 0.08) for peak in peaks], abs=1e-8)


def test_a_limit_is_where_the_chance_is_met_for_many_layouts_at_once():
    spread = MemoryDistribution(location=np.array([-0.1, 0.0, 0.05]), scale=np.array([0.02, 0.1, 0.3]))
    for chance in (0.01, 0.05, 0.5, 0.9, 0.95, 0.99):
        limits = largest_peak_bytes(80e9, spread, chance)
        assert limits.shape == (3,)
        assert chance_of_fitting(limits, 80e9, spread) == pytest.approx(np.full(3, chance))
    assert np.all(largest_peak_bytes(80e9, spread, 0.99) < largest_peak_bytes(80e9, spread, 0.95))


def test_stages_that_share_their_error_fit_together_when_the_worst_does():
    peaks, whole = np.array([60e9, 70e9, 39e9]), np.array([80e9, 80e9, 40e9])
    error = np.exp(-0.03 + 0.08 * np.random.default_rng(1).standard_t(4, size=400_000))
    together = np.mean(np.all(error[:, None] * peaks <= whole, axis=1))
    assert np.min(chance_of_fitting(peaks, whole, _SPREAD)) == pytest.approx(together, abs=0.004)


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.3, 0.9])
def test_the_upper_line_moves_with_the_risk_and_the_lower_one_stays(make_job, risk):
    """The device's memory is changed until the chance crosses each line; the peak stays the same."""
    layout = parse_layout("dp=8,zero=3", num_layers=32, num_devices=8)
    memory = (MemorySpread(counter="device", location=-0.03, scale=0.08),)
    job = replace(make_job("llama3-8b", gpus=8, engine="fsdp"), spread=Spread(memory=memory), risk=risk)
    (peak,) = {stage.total_bytes for stage in memory_of_stages(job, layout)}
    draws = np.exp(-0.03 + 0.08 * np.random.default_rng(2).standard_t(4, size=400_000))
    told = set()
    for ratio in np.linspace(0.6, 1.8, 60):
        device = job.cluster.device.model_copy(update={"memory": peak * ratio})
        sized = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
        (stage,) = memory_of_stages(sized, layout)
        share = np.mean(draws <= ratio)
        assert stage.chance_of_fitting == pytest.approx(share, abs=0.004)
        if abs(share - (1 - risk)) > 0.004 and abs(share - 0.05) > 0.004:
            assert stage.verdict == (
                "fits" if share >= 1 - risk else "may not fit" if share >= 0.05 else "does not fit"
            )
            assert stage.fits == (stage.verdict == "fits")
            told.add(stage.verdict)
    assert told == {"fits", "may not fit", "does not fit"}


def test_headroom_replaces_the_chance_by_a_plain_limit(make_job):
    layout = parse_layout("dp=8,zero=3", num_layers=32, num_devices=8)
    job = make_job("llama3-8b", gpus=8, engine="fsdp")
    (stage,) = memory_of_stages(job, layout)
    share = stage.total_bytes / job.whole_memory_bytes
    for headroom, verdict in ((1 - share * 1.001, "fits"), (1 - share * 0.999, "does not fit")):
        (found,) = memory_of_stages(replace(job, headroom=headroom), layout)
        assert (found.verdict, found.chance_of_fitting) == (verdict, stage.chance_of_fitting)


def test_a_plan_keeps_the_errors_of_its_own_engine_and_of_all_engines(make_job):
    kinds = [("device", "fsdp"), ("device", None), ("needed", None), ("device", "megatron"), ("allocated", "fsdp")]
    memory = tuple(MemorySpread(counter=counter, engine=engine, location=0, scale=1) for counter, engine in kinds)
    job = replace(make_job("llama3-8b", gpus=8, engine="fsdp"), spread=Spread(memory=memory, tails=1.5))
    assert spread_for(job) == Spread(memory=memory[:3], tails=1.5)


def test_a_plan_document_without_stages_has_a_verdict():
    assert verdict_of(()) == "fits"


def test_without_measured_peaks_8_of_10_peaks_lie_within_17_percent(make_job):
    layout = parse_layout("dp=8,zero=3", num_layers=32, num_devices=8)
    spread = spread_of(replace(make_job("llama3-8b", gpus=8, engine="fsdp"), spread=Spread()), layout)
    draws = np.exp(0.1 * np.random.default_rng(3).standard_t(4, size=400_000))
    assert chance_of_fitting(np.array([1 / 1.17, 1.0, 1.17]), 1.0, spread) == pytest.approx(
        [np.mean(draws < 1.17), 0.5, np.mean(draws < 1 / 1.17)], abs=0.004
    )
    assert np.mean((draws > 1 / 1.17) & (draws < 1.17)) == pytest.approx(0.8, abs=0.02)
