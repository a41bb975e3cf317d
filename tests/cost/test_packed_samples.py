"""Samples packed into a sequence attend only to themselves; the oracle counts pairs of samples of random lengths."""

from __future__ import annotations

import random

import pytest

from planner.cost.flops import attention_flops_per_token, model_flops_per_step
from planner.cost.layers import layer_seconds
from planner.layout_text import parse_layout

LENGTH = 16_384


def pairs_per_token(mean: int) -> float:
    """Mean number of keys of a query, for samples of random lengths that fill a long text."""
    drawn = random.Random(7)
    lengths = [max(1, round(drawn.expovariate(1 / mean))) for _ in range(50_000)]
    return sum(each * (each + 1) / 2 for each in lengths) / sum(lengths)


@pytest.mark.parametrize("mean", [64, 512, 2_000])
def test_a_query_sees_as_many_keys_as_in_samples_of_random_lengths(make_job, mean):
    job = make_job("llama3-8b", settings=(f"training.mean_sample_tokens={mean}",), sequence=LENGTH, batch=8)
    seen = attention_flops_per_token(job.model, job.training.attended_tokens, causal=True) / (32 * 4 * 4096)
    assert seen == pytest.approx(pairs_per_token(mean), rel=0.03)


@pytest.mark.parametrize("mean", [512, 2_000])
def test_the_step_loses_the_pairs_of_different_samples(make_job, mean):
    """Seconds and FLOPs of the core shrink by one factor; nothing else of a step knows where samples begin."""
    whole, packed = (
        make_job("llama3-8b", settings=(f"training.mean_sample_tokens={each}",), sequence=LENGTH, batch=8)
        for each in (0, mean)
    )
    layout = parse_layout("dp=8", num_layers=32, num_devices=8)
    one, other = layer_seconds(whole, layout), layer_seconds(packed, layout)
    launch = whole.launch_seconds
    assert float(other.core.forward - launch) == pytest.approx(
        float(one.core.forward - launch) * 2 * mean / LENGTH, rel=2e-3
    )
    outside = [float(each.passes.forward - each.core.forward) for each in (one, other)]
    assert outside[0] == pytest.approx(outside[1])
    lost = [model_flops_per_step(job.model, job.training) for job in (whole, packed)]
    cores = 3 * 32 * 4 * 4096 * (LENGTH / 2 - mean) * LENGTH * 8
    assert lost[0] - lost[1] == pytest.approx(cores)


@pytest.mark.parametrize("mean", [LENGTH // 2, LENGTH, 10 * LENGTH])
def test_samples_as_long_as_the_sequence_change_nothing(make_job, mean):
    job = make_job("llama3-8b", settings=(f"training.mean_sample_tokens={mean}",), sequence=LENGTH, batch=8)
    assert job.training.attended_tokens == LENGTH
