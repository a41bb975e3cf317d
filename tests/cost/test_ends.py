"""Prices of layouts in which the model's ends are pieces of the pipeline: a stage takes the sum of its pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.compute import PassSeconds
from planner.cost.estimate import estimate
from planner.cost.flops import chunk_flops
from planner.cost.parameters import mtp_params, num_params
from planner.cost.prices import chunk_parts, layout_prices, stage_parts
from planner.cost.schedule import chunk_terms, interleaved_bubble_seconds
from planner.cost.simulate import simulate
from planner.cost.stage import held_params, stages_of
from planner.layout_text import parse_layout

PLACES = [
    "layers_per_stage=4/4/4/3",
    "layers_per_stage=5/5/5/0",
    "layers_per_stage=0/5/5/5",
    "layers_per_stage=0/8/7/0,mtp=2",
    "interleave=2,layers_per_stage=2/2/2/2/2/2/2/1",
    "interleave=2,layers_per_stage=3/2/2/3/2/2/1/0,mtp=6",
    "interleave=2,layers_per_stage=0/3/2/3/3/2/2/0",
]


@pytest.fixture(name="job")
def _job(make_job):
    more = ("model.num_layers=15", "model.mtp_layers=1")
    return make_job("deepseek-v2-lite", "dgx-h100", engine="megatron", gpus=16, batch=64, sequence=4096, settings=more)


def executed_seconds(passes, m, layout_schedule, interleave):
    """The end of the executed schedule."""
    return simulate(layout_schedule, passes, m, interleave=interleave).seconds


def layout_of(text):
    return parse_layout(f"tp=1,pp=4,ep=4,zero=1,{text}", num_layers=15, num_devices=16)


def test_work_and_parameters_are_the_same_wherever_the_ends_stand(job):
    (pool,) = job.pools
    seconds, flops, held = [], [], []
    for text in PLACES:
        layout = layout_of(text)
        prices = layout_prices(job, layout)
        seconds.append(float(np.sum(prices.compute + prices.head + prices.tp_comm)))
        flops.append(float(chunk_flops(job, layout)["forward"].sum()))
        of_stages = held_params(pool, layout, stages_of(job, layout))
        held.append(float(np.sum(of_stages.common + of_stages.experts * layout.ep)))
    assert seconds == pytest.approx([seconds[0]] * len(PLACES))
    assert flops == pytest.approx([flops[0]] * len(PLACES))
    embedding = job.model.vocab_size * job.model.hidden_size  # a second copy, where multi-token prediction reads it
    whole = num_params(job.model) + mtp_params(job.model) + embedding
    assert held == pytest.approx([whole] * len(PLACES), rel=0.002)  # the vocabulary is padded


def test_a_chunk_takes_the_sum_of_its_pieces(job):
    (pool,) = job.pools
    layout = layout_of("interleave=2,layers_per_stage=3/2/2/3/2/2/1/0,mtp=6")
    parts, found = stage_parts(pool, layout), sum(chunk_parts(job, layout).values(), PassSeconds()).total
    heads = float(parts.head.total)
    assert float(found[-1]) == pytest.approx(heads, rel=0.05)  # the loss alone: no layer, and no gradients of any
    inner, beside = float(found[2]) / 2, float(found[6])
    assert beside == pytest.approx(2 * inner + float(parts.mtp.total), rel=0.02)  # a layer, and one of prediction


def test_a_stage_of_an_end_alone_holds_its_end(job):
    (pool,) = job.pools
    layout = layout_of("layers_per_stage=0/8/7/0,mtp=2")
    held = held_params(pool, layout, stages_of(job, layout))
    matrix = job.model.vocab_size * job.model.hidden_size
    assert held.experts[[0, 3]].tolist() == [0, 0]
    assert held.common[[0, 3]] == pytest.approx(matrix, rel=0.002)


@pytest.mark.parametrize("text", PLACES)
def test_steps_with_ends_as_pieces_are_near_the_executed_schedule(job, text):
    layout = layout_of(text)
    passes = sum(chunk_parts(job, layout).values(), PassSeconds())
    m = layout.num_microbatches(job.training.global_batch_size)
    executed = executed_seconds(passes, m, layout.schedule, layout.interleave)
    assert estimate(job, layout).pipeline_seconds == pytest.approx(executed, rel=0.1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([2, 3, 4, 8]), st.integers(2, 4), st.integers(1, 6), st.data())
def test_a_short_last_chunk_takes_about_the_executed_time(pp, v, largest, data):
    """Equal stages, but for a last chunk with an end of the model; times in units of a layer."""
    head, rounds = data.draw(st.sampled_from([0.3, 0.7, 1.5, 2.5, 4.0])), data.draw(st.sampled_from([1, 2, 4, 8]))
    last = max(0, round(largest - head))
    chunks = np.full((v, pp), largest, dtype=float)
    chunks[-1, -1] = last
    layers, is_last = chunks.sum(axis=0), np.arange(pp) == pp - 1
    stage, m = layers + head * is_last, pp * rounds
    fill, slack = chunk_terms(
        stage_seconds=stage,
        layer_seconds=1.0,
        num_layers=layers,
        largest_chunk=np.full(pp, largest),
        last_chunk=chunks[-1],
        end_seconds=head * is_last,
        is_last=is_last,
        pp=pp,
        num_microbatches=m,
        interleave=v,
    )
    chunks[-1, -1] += head
    third = chunks.ravel() / 3
    passes = PassSeconds(forward=third, backward_input=third, backward_weight=third)
    executed = executed_seconds(passes, m, "interleaved", v)
    form = m * np.max(stage) + interleaved_bubble_seconds(stage, fill, slack, m, v)
    assert -0.05 < form / executed - 1 < 0.25
