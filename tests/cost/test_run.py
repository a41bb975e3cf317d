"""The whole run compared with published days, and properties that every run must have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.flops import sc21_flops_per_step
from planner.cost.run import longest_step_seconds, num_steps, price_of, whole_run
from planner.specs.load import load_job


def job(model="gpt3-175b", nodes=128, batch=1536, **training):
    loaded = load_job(model=model, cluster="dgx-a100", nodes=nodes, global_batch_size=batch, sequence_length=2048)
    return replace(loaded, training=loaded.training.model_copy(update=training))


JOB = job()


def run_of(job, step_seconds, num_devices):
    return whole_run(job.model, job.training, step_seconds=step_seconds, in_use=((job.cluster, num_devices),))


@pytest.mark.parametrize(
    ("model", "batch", "nodes", "tokens", "teraflops", "days"),
    [("gpt3-175b", 1536, 128, 300e9, 140, 34), ("megatron-1t", 3072, 384, 450e9, 163, 84)],
)
def test_days_of_the_sc21_paper(model, batch, nodes, tokens, teraflops, days):
    """Steps at the stated throughput take the stated number of days, both step by step and in closed form."""
    asked = job(model, nodes, batch, tokens=tokens)
    step = sc21_flops_per_step(asked.model, asked.training) / (nodes * 8 * teraflops * 1e12)
    found = run_of(asked, step, nodes * 8)
    assert found.closed_form_days == pytest.approx(days, abs=0.6)
    assert found.days == pytest.approx(days, rel=0.05)  # the closed form leaves out attention's square
    assert found.steps == math.ceil(tokens / (batch * 2048))


def test_hours_money_and_energy_by_hand():
    asked = job(tokens=1536 * 2048 * 1000.0, price=2.5)
    found = run_of(asked, 36.0, 1024)  # 1,000 steps of 36 s are 10 hours
    assert (found.steps, found.seconds, found.days) == (1000, 36_000.0, pytest.approx(10 / 24))
    assert found.device_hours == pytest.approx(10_240)
    assert found.usd == pytest.approx(25_600)
    assert found.kilowatt_hours == pytest.approx(10_240 * 0.4)  # an A100 is rated 400 W


def test_price_of_the_training_document_goes_before_the_cluster_s():
    asked = job()
    priced = asked.cluster.model_copy(update={"price": 3.0})
    assert price_of(asked.cluster, asked.training) is None
    assert price_of(priced, asked.training) == 3.0
    assert price_of(priced, job(price=4.0).training) == 4.0


def test_without_a_budget_there_is_no_run():
    assert num_steps(job().training) is None
    assert run_of(job(), 1.0, 8) is None
    assert longest_step_seconds(job(deadline=86400.0).training) == math.inf
    assert longest_step_seconds(job(tokens=1e9).training) == math.inf


@given(
    tokens=st.floats(1e6, 1e13),
    deadline=st.floats(1.0, 1e9),
    seconds=st.floats(1e-3, 1e3),
    num_devices=st.integers(1, 100_000),
)
def test_a_run_meets_its_deadline_exactly_when_its_steps_are_short_enough(tokens, deadline, seconds, num_devices):
    budget = {"tokens": tokens, "deadline": deadline}
    asked = replace(JOB, training=JOB.training.model_copy(update=budget))
    found = run_of(asked, seconds, num_devices)
    limit = longest_step_seconds(asked.training)
    if not math.isclose(seconds, limit, rel_tol=1e-12):
        assert found.meets_deadline == (seconds < limit)
    twice = run_of(asked, seconds, 2 * num_devices)
    assert twice.device_hours == pytest.approx(2 * found.device_hours)
    assert twice.seconds == found.seconds
