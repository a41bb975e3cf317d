"""Error bands: quantiles of forecast errors, wider where there are no measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from project_tools import load_tool
from pydantic import ValidationError

from planner.cost.band import (
    axes_of,
    band,
    band_of,
    distribution_of,
    time_distribution,
    unseen_of,
)
from planner.layout_text import parse_layout
from planner.specs.calibration import CalibrationEntry, Evidence, Spread
from planner.specs.job import each_pool

TOOL = load_tool("band_widths")
one_family_of, spread_of = TOOL.one_family_of, TOOL.spread_of

KEYS = {"device": "a100-80gb", "engine": "megatron", "precision": "16", "experts": False, "axes": "tp+pp"}
RATIOS = st.lists(st.floats(0.5, 2.0), min_size=20, max_size=60)


def evidence(ratios, **keys):
    return Evidence.model_validate({**KEYS, **keys, "ratios": tuple(ratios)})


@given(RATIOS)
def test_runs_of_one_kind_give_plain_quantiles(ratios):
    found = band_of([evidence(ratios)], Spread(tails=1.0), **KEYS)
    low, high = np.exp(np.quantile(np.log(ratios), [0.1, 0.9], method="hazen"))
    assert found.low == pytest.approx(min(low, 1.0))
    assert found.high == pytest.approx(max(high, 1.0))
    assert (found.num_near, found.unseen) == (len(ratios), ())


@given(RATIOS, RATIOS)
def test_the_order_and_the_grouping_of_runs_do_not_matter(one, other):
    together = band_of([evidence([*one, *other])], **KEYS)
    apart = band_of([evidence(other), evidence(one)], **KEYS)
    assert (apart.low, apart.high) == pytest.approx((together.low, together.high))


@given(RATIOS, st.sampled_from(["device", "engine", "axes"]))
def test_what_no_run_has_is_named_and_makes_the_band_wider(ratios, key):
    runs = [evidence([0.9, 1.1, *ratios])]
    known, unknown = band_of(runs, **KEYS), band_of(runs, **{**KEYS, key: "new"})
    assert unknown.unseen == (key,)
    assert unknown.num_near == 0
    assert unknown.high / unknown.low >= known.high / known.low


def test_runs_like_the_layout_count_most():
    runs = [evidence([1.0, 1.01, 0.99] * 10), evidence([0.5, 2.0] * 15, engine="fsdp", axes="fsdp", experts=True)]
    spread = Spread(tails=1.0)
    near, far = (
        band_of(runs, spread, **KEYS),
        band_of(runs, spread, **{**KEYS, "engine": "fsdp", "axes": "fsdp", "experts": True}),
    )
    assert near.high / near.low < far.high / far.low


def test_a_job_finds_its_evidence(make_job):
    job = make_job("gpt3-175b", engine="megatron", gpus=64, batch=64)
    layout = parse_layout("tp=8,pp=8,dp=1", num_layers=96, num_devices=64)
    found = band(job, layout)
    assert found is not None
    assert found.low < 1 < found.high
    near = [e for e in job.evidence if (e.device, e.engine, e.axes) == ("a100-80gb", "megatron", "tp+pp")]
    assert found.num_near == sum(len(e.ratios) for e in near) > 0
    assert band(replace(job, evidence=()), layout) is None
    own = replace(job, calibration=CalibrationEntry(low=0.9, high=1.2, num_rows=3))
    assert band(own, layout).high == 1.2  # a user's own quantiles are believed


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("tp=2,pp=2,dp=2,zero=1", "tp+pp"),
        ("dp=8,zero=1", "dp"),
        ("dp=8,zero=3", "fsdp"),
        ("tp=2,cp=2,dp=2,zero=3", "tp+cp+fsdp"),
    ],
)
def test_axes_are_what_divides_the_work(text, axes):
    assert axes_of(parse_layout(text, num_layers=32, num_devices=8)) == axes


def sources(rng, *, between, within, number=40, runs=25, **keys):
    """Runs of sources whose log errors are normally distributed around the source's own mean."""
    means = rng.normal(0, between, number)
    return [
        evidence(np.exp(mean + rng.normal(0, within, runs)), source=f"source {place}", **keys)
        for place, mean in enumerate(means)
    ]


def inside(found, between, within, rng):
    ratios = np.exp(rng.normal(0, between, 4000) + rng.normal(0, within, 4000))
    return np.mean((found.quantile(0.1) <= ratios) & (ratios <= found.quantile(0.9)))


def test_eight_of_ten_runs_of_a_new_source_lie_inside():
    shares = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        runs = sources(rng, between=0.2, within=0.1, number=60, runs=8)
        shares.append(inside(distribution_of(runs, spread_of(runs), **KEYS), 0.2, 0.1, rng))
    assert np.mean(shares) == pytest.approx(0.8, abs=0.04)


def test_a_source_with_many_runs_counts_as_one():
    rng = np.random.default_rng(0)
    few = sources(rng, between=0.1, within=0.05)
    many = [*few, evidence(np.exp(rng.normal(1.0, 0.05, 2000)), source="large")]
    spread = Spread(tails=1.0)
    before, after = (distribution_of(runs, spread, **KEYS).quantile(0.5) for runs in (few, many))
    assert after == pytest.approx(before, rel=0.03)


def test_kinds_that_sources_do_not_share_are_told_less_well_and_widen_the_band():
    rng = np.random.default_rng(1)
    shared = sources(rng, between=0.1, within=0.05)
    alone = [evidence(np.exp(rng.normal(0, 0.4, 10)), source=f"alone {n}", device=f"device-{n}") for n in range(20)]
    spread = spread_of([*shared, *alone])
    assert spread.unseen > 2
    new = {**KEYS, "device": "new"}
    found, plain = band_of([*shared, *alone], spread, **new), distribution_of([*shared, *alone], spread, **new)
    width = np.log(plain.quantile(0.9) / plain.quantile(0.1))
    assert np.log(found.high / found.low) == pytest.approx(spread.unseen * width, rel=0.05)


@given(RATIOS, st.floats(0.02, 0.98), st.integers(0, 2))
def test_chance_is_the_inverse_of_the_quantile(ratios, level, num_unseen):
    runs = [evidence([0.2, *ratios, 5.0])]
    found = distribution_of(runs, Spread(tails=1.2, unseen=1.4), num_unseen=num_unseen, **KEYS)
    value = found.quantile(level)
    assert found.quantile(min(level + 0.01, 0.99)) >= value
    if 0.05 < level < 0.95:
        assert found.quantile(found.chance(value)) == pytest.approx(value, rel=1e-6)
    assert found.chance(1e-3) == 0.0
    assert found.chance(1e3) == 1.0


def test_what_sets_a_job_apart_is_named(make_job):
    job = make_job("llama3-8b", engine="megatron-bridge", gpus=8, batch=64)
    job = replace(job, training=job.training.model_copy(update={"lora_rank": 16}))
    layout = parse_layout("tp=1,pp=1,dp=8", num_layers=32, num_devices=8)
    job = replace(job, engine=job.engine.model_copy(update={"stands_for": "SuperTrain 3"}))
    job = replace(job, spread=Spread(unseen=1.5, memory=job.spread.memory))
    found = band(job, layout)
    assert found.unseen[-2:] == ("adapters", "unknown framework")
    assert found.num_near == 0
    plain = replace(job, training=job.training.model_copy(update={"lora_rank": 0}))
    known = replace(plain, engine=job.engine.model_copy(update={"stands_for": ""}))
    widths = [each.high / each.low for each in (found, band(plain, layout), band(known, layout))]
    assert widths[0] > 1.05 * widths[1] > 1.1 * widths[2]
    seen = [evidence([0.9, 1.0, 1.1], source="other", features=("unknown framework",))]
    assert "unknown framework" in unseen_of(seen, **KEYS, features=("unknown framework",))  # each is another one
    whole = time_distribution(job, layout)
    assert (min(whole.quantile(0.1), 1.0), max(whole.quantile(0.9), 1.0)) == (found.low, found.high)


def test_bands_of_one_family_hold_eight_of_ten_runs_of_families_that_were_held_out():
    """Every family has a bias of its own, which the evidence of one family cannot show."""
    rng = np.random.default_rng(5)
    biases = [0.0, 0.4, -0.4, 0.3, -0.3, 0.5]
    runs, held = [], []
    for number, bias in enumerate(biases):
        keys = {"family": f"f{number}", "source": f"s{number}", "engine": f"e{number // 2}"}
        noise = 0.02 * rng.standard_normal(40)
        runs.append(evidence(np.exp(noise), **keys))  # a sibling in the fit takes the bias away
        held.append(evidence(np.exp(noise + bias), **keys))
    spread = spread_of(runs)
    factor = one_family_of(runs, held, spread)
    assert 1 < factor < 4.0001
    assert one_family_of(runs, runs, spread) < factor
    wider = spread.model_copy(update={"one_family": min(factor, 4.0)})
    inside = []
    for each in held:
        others = [run for run in runs if run.family != each.family]
        keys = {**KEYS, "engine": each.engine}
        alone, plain = (band_of(others, given, **keys) for given in (wider, spread))
        assert alone.family
        assert np.log(alone.high / alone.low) >= np.log(plain.high / plain.low)
        inside += [alone.low <= ratio <= alone.high for ratio in each.ratios]
    assert factor == 4.0 or np.mean(inside) >= 0.8


def test_a_band_of_the_user_s_own_runs_holds_eight_of_ten_runs(make_job):
    """A logistic distribution: its quartiles lie log(3) / log(9), that is a half, of the way to the band's ends."""
    own = CalibrationEntry(device="h100-80gb", engine="torch", low=0.9, high=1.6, num_rows=5)
    job = each_pool(make_job("llama3-8b", gpus=8), lambda pool: replace(pool, calibration=own))
    found = time_distribution(job, parse_layout("dp=8", num_layers=32, num_devices=8))
    middle, half = np.sqrt(0.9 * 1.6), np.sqrt(1.6 / 0.9)
    ends = {0.1: 0.9, 0.5: middle, 0.9: 1.6, 0.75: middle * np.sqrt(half), 0.25: middle / np.sqrt(half)}
    assert {level: found.quantile(level) for level in ends} == pytest.approx(ends)


@pytest.mark.parametrize("tails", [0, -0.5])
def test_a_factor_on_the_tails_is_positive(tails):
    with pytest.raises(ValidationError):
        Spread(tails=tails)
