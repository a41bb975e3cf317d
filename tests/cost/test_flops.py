"""FLOPs and days against published figures."""

from __future__ import annotations

import pytest

from planner.cost.flops import end_to_end_days, model_flops_per_step, sc21_flops_per_step
from planner.cost.parameters import num_params


@pytest.mark.parametrize(
    ("tokens", "params", "gpus", "teraflops", "days"),
    [(300e9, 175e9, 1024, 140, 34), (450e9, 1.008e12, 3072, 163, 84)],
)
def test_days_of_the_sc21_paper(tokens, params, gpus, teraflops, days):
    assert end_to_end_days(tokens, params, gpus, teraflops * 1e12) == pytest.approx(days, abs=0.5)


def test_sc21_equation_counts_four_passes_and_the_full_square(make_job):
    """96 B s L h^2 is 4 passes of 24 h^2 per token and layer; attention and the head are added by hand here."""
    job = make_job("megatron-22b", batch=4)
    m, s = job.model, 2048
    h, layers, tokens = m.hidden_size, m.num_layers, 4 * s
    by_hand = 4 * tokens * layers * (24 * h * h + 4 * s * h) + 3 * 2 * tokens * h * m.vocab_size
    assert sc21_flops_per_step(m, job.training) == pytest.approx(by_hand)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b", "llama2-7b"])
def test_model_flops_are_about_six_per_parameter_and_token(make_job, name):
    job = make_job(name)
    six = 6 * num_params(job.model) * 64 * 2048
    assert six * 0.9 < model_flops_per_step(job.model, job.training) < six * 1.15
