"""Published fits of batch sizes compared with numbers that other texts derive from the fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.critical_batch import (
    batch_advice,
    critical_batch_tokens,
    deepseek_batch_tokens,
    expected_loss,
    extra_steps,
    extra_tokens,
    linear_learning_rate,
    square_root_learning_rate,
    step_law_batch_tokens,
)

POSITIVE = st.floats(1e3, 1e9)


def test_loss_agrees_with_the_compute_law_of_the_gpt3_paper():
    # Brown et al. (2020), figure 3.1: loss 2.57 C^-0.048 with C in petaflop/s-days; GPT-3 took 3,640 of them
    assert expected_loss(175e9, 300e9) == pytest.approx(2.57 * 3640**-0.048, rel=0.05)


def test_deepseek_law_gives_the_batch_of_its_larger_model():
    # DeepSeek LLM (2024), table 2: 67B parameters, 2 T tokens, batch 4608 of 4096 tokens
    assert deepseek_batch_tokens(6 * 67e9 * 2e12) == pytest.approx(4608 * 4096, rel=0.5)


def test_a_critical_batch_takes_twice_the_tokens_and_twice_the_steps():
    critical = critical_batch_tokens(2.0)
    assert extra_tokens(critical, critical) == extra_steps(critical, critical) == 2.0


@given(batch=POSITIVE, critical=POSITIVE)
def test_steps_and_tokens_trade_as_mccandlish_found(batch, critical):
    assert (extra_steps(batch, critical) - 1) * (extra_tokens(batch, critical) - 1) == pytest.approx(1.0)


@given(params=st.floats(1e6, 1e13), tokens=st.floats(1e8, 1e14), factor=st.floats(1.01, 100))
def test_more_training_allows_larger_batches(params, tokens, factor):
    assert expected_loss(params, tokens * factor) < expected_loss(params, tokens)
    assert expected_loss(params * factor, tokens) < expected_loss(params, tokens)
    assert step_law_batch_tokens(tokens * factor) > step_law_batch_tokens(tokens)
    longer, shorter = (critical_batch_tokens(expected_loss(params, t)) for t in (tokens * factor, tokens))
    assert longer > shorter


@given(rate=st.floats(1e-6, 1.0), batch=st.integers(1, 10_000), other=st.integers(1, 10_000))
def test_learning_rates_scale_back_and_the_root_rule_changes_less(rate, batch, other):
    for rule in (linear_learning_rate, square_root_learning_rate):
        assert rule(rule(rate, batch, other), other, batch) == pytest.approx(rate)
    linear, root = linear_learning_rate(rate, batch, other), square_root_learning_rate(rate, batch, other)
    assert root**2 == pytest.approx(rate * linear)


def test_advice_says_what_it_assumes(make_job):
    job = make_job("gpt3-175b")
    advice = batch_advice(job.model, job.training)
    assert advice.run_tokens_assumed
    assert advice.run_tokens == pytest.approx(20 * 175e9, rel=0.01)
    given_tokens = batch_advice(job.model, job.training.model_copy(update={"tokens": 3e11}))
    assert not given_tokens.run_tokens_assumed
    assert given_tokens.run_tokens == 3e11
    assert advice.batch_tokens == job.training.global_batch_size * job.training.sequence_length
    assert all(each.source and each.num_tokens > 0 for each in advice.estimates)
