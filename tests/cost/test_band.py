"""Error bands: quantiles of what forecasts missed by, wider where nobody measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.band import axes_of, band, band_of
from planner.layout import parse_layout
from planner.specs.calibration import CalibrationEntry, Evidence

KEYS = {"device": "a100-80gb", "engine": "megatron", "precision": "16", "experts": False, "axes": "tp+pp"}
RATIOS = st.lists(st.floats(0.5, 2.0), min_size=20, max_size=60)


def evidence(ratios, **keys):
    return Evidence.model_validate({**KEYS, **keys, "ratios": tuple(ratios)})


@given(RATIOS)
def test_runs_of_one_kind_give_plain_quantiles(ratios):
    found = band_of([evidence(ratios)], **KEYS)
    low, high = np.exp(np.quantile(np.log(ratios), [0.08, 0.92], method="hazen"))
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
    runs = [evidence([1.0, 1.01, 0.99] * 10), evidence([0.5, 2.0] * 15, engine="fsdp", axes="fsdp")]
    near, far = band_of(runs, **KEYS), band_of(runs, **{**KEYS, "engine": "fsdp", "axes": "fsdp"})
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
