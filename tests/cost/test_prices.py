"""Prices of stages and chunks: the sums of seconds by cause and by pass are equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.compute import PassSeconds
from planner.cost.estimate import estimate
from planner.cost.ledger import LineName
from planner.cost.prices import chunk_parts, interleaving_terms, stage_prices
from planner.cost.schedule import interleaved_bubble_seconds
from planner.cost.stage import chunks_of, stages_of
from planner.layout import head_stage
from planner.layout_text import parse_layout

MODELS = ("llama3-8b", "gpt2-xl", "deepseek-v3")
PASSES = ("forward", "backward_input", "backward_weight")


def chunk_seconds(job, layout):
    return sum(chunk_parts(job, layout).values(), PassSeconds())


@st.composite
def layouts(draw):
    schedule = draw(st.sampled_from(["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]))
    interleave = draw(st.integers(2, 3)) if schedule == "interleaved" else 2 if schedule in ("zbv", "dualpipev") else 1
    zero, policy = draw(st.integers(0, 3)), draw(st.sampled_from(["none", "selective", "full"]))
    pp, tp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    text = f"schedule={schedule},interleave={interleave},tp={tp},pp={pp},cp={cp},zero={zero},recompute={policy}"
    return text + (f",ep={draw(st.sampled_from([1, 4]))}")


@settings(max_examples=60)
@given(layouts(), st.sampled_from(MODELS), st.sampled_from(["megatron", "torch", "deepspeed"]))
def test_passes_chunks_and_causes_have_the_same_sum(make_job, text, model, engine):
    job = make_job(model, engine=engine, gpus=64, batch=256, sequence=1024)
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=64)
    prices = stage_prices(job, layout, stages_of(job, layout))
    by_cause = np.broadcast_to(prices.microbatch_seconds, layout.pp)
    assert np.broadcast_to(prices.passes.total, layout.pp) == pytest.approx(by_cause, rel=1e-12)
    chunks, where = chunk_seconds(job, layout), chunks_of(job, layout).index
    for name in PASSES:
        of_chunks = getattr(chunks, name)
        assert np.all(of_chunks > 0)
        of_stages = np.broadcast_to(getattr(prices.passes, name), layout.pp)
        assert np.bincount(where, weights=of_chunks) == pytest.approx(of_stages, rel=1e-9)


@settings(max_examples=30)
@given(layouts(), st.sampled_from(MODELS), st.sampled_from(["megatron", "torch", "deepspeed"]))
def test_parts_of_the_chunks_are_the_causes_of_the_stage(make_job, text, model, engine):
    job = make_job(model, engine=engine, gpus=64, batch=256, sequence=1024)
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=64)
    prices = stage_prices(job, layout, stages_of(job, layout))
    causes = {
        LineName.COMPUTE: prices.compute,
        LineName.RECOMPUTE: prices.recompute,
        LineName.HEAD: prices.head,
        LineName.UNGRADED: prices.ungraded,
        LineName.ACCUMULATION: prices.accumulation,
        LineName.TP_COMM: prices.tp_comm - prices.tp_hidden,
        LineName.CP_COMM: prices.cp_comm - prices.cp_hidden,
        LineName.EP_COMM: prices.ep_comm,
        LineName.PP_COMM: prices.pp_comm - prices.pp_hidden,
        LineName.HOST_COMM: prices.host.exposed.total,
        LineName.DP_COMM: prices.dp.exposed.total,
    }
    parts, where = chunk_parts(job, layout), chunks_of(job, layout).index
    assert parts.keys() == causes.keys()
    for name, seconds in causes.items():
        of_stages = np.bincount(where, weights=np.broadcast_to(parts[name].total, layout.num_chunks))
        assert of_stages == pytest.approx(np.broadcast_to(seconds, layout.pp), rel=1e-9, abs=1e-15), name


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl"])
def test_half_of_the_backward_pass_of_a_linear_map_is_for_the_weights(make_job, model):
    """Both products of the backward pass have the forward FLOPs; attention and norms only have gradients of inputs."""
    job = make_job(model, gpus=8, batch=64, sequence=1024)
    layout = parse_layout("pp=4,dp=2", num_layers=job.model.num_layers, num_devices=8)
    chunks = chunk_seconds(job, layout)
    middle = slice(1, 3)
    assert np.all(chunks.backward_weight[middle] < chunks.backward_input[middle])
    assert np.all(chunks.backward_weight[middle] < chunks.forward[middle])
    assert np.all(chunks.backward_weight[middle] > 0.5 * chunks.forward[middle])


@pytest.mark.parametrize(("schedule", "last"), [("1f1b", 3), ("interleaved", 3), ("zbv", 0), ("dualpipev", 0)])
def test_the_head_is_in_the_last_chunk_and_on_its_stage(make_job, schedule, last):
    job = make_job("gpt2-xl", gpus=8, batch=64, sequence=1024)
    interleave = 1 if schedule == "1f1b" else 2
    text = f"pp=4,dp=2,schedule={schedule},interleave={interleave}"
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=8)
    assert head_stage(layout) == last == chunks_of(job, layout).index[-1]
    assert np.argmax(chunk_seconds(job, layout).forward) == layout.num_chunks - 1
    compute = stage_prices(job, layout, stages_of(job, layout)).head
    assert np.flatnonzero(compute > compute.max() / 2).tolist() == [last]


def test_a_v_goes_there_and_back_again():
    layout = parse_layout("pp=3,schedule=zbv", num_layers=13, num_devices=3)
    assert layout.interleave == 2
    assert [layout.chunks_of_stage(r) for r in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert layout.layers_per_stage == (2, 2, 3, 2, 2, 2)  # the first stage holds the head
    assert [layout.layers_of_stage(r) for r in range(3)] == [4, 4, 5]


def test_the_bubble_of_unequal_chunks_is_the_closed_form_of_their_stages(make_job):
    """30 layers in 2 x 2 chunks of 8, 8, 7 and 7: a stage fills the pipeline as if its chunks had 8 layers each."""
    job = make_job("gpt2-xl", gpus=8, batch=64, sequence=1024, settings=("model.num_layers=30",))
    layout = parse_layout("pp=2,interleave=2,dp=4,schedule=interleaved", num_layers=30, num_devices=8)
    assert layout.layers_per_stage == (8, 8, 7, 7)
    stages = stages_of(job, layout)
    prices = stage_prices(job, layout, stages)
    fill, slack = interleaving_terms(job, layout, stages, prices)
    assert np.all(fill > prices.microbatch_seconds)
    bubble = interleaved_bubble_seconds(
        stage_seconds=prices.microbatch_seconds, fill_seconds=fill, slack_seconds=slack, num_microbatches=16,
        interleave=2,
    )  # fmt: skip
    [line] = [line for line in estimate(job, layout).time if line.name == LineName.BUBBLE]
    assert line.busy_seconds == pytest.approx(float(bubble))


def test_the_slack_of_the_last_stage_is_the_last_chunk_with_its_head_and_further_layers(make_job):
    """8 of 16 layers, the layer for a further token, and two heads; the chunk's own seconds are the oracle."""
    job = make_job("llama3-8b", gpus=8, batch=64, settings=("model.mtp_layers=1",))
    layout = parse_layout("pp=2,interleave=2,dp=4,schedule=interleaved", num_layers=32, num_devices=8)
    stages = stages_of(job, layout)
    _, slack = interleaving_terms(job, layout, stages, stage_prices(job, layout, stages))
    assert slack[-1] == pytest.approx(chunk_seconds(job, layout).total[-1], rel=0.02)


def test_a_host_that_waits_for_all_ranks_stretches_both_passes_of_a_layer(make_job, with_engine):
    """4 collectives of the forward and 6 of the backward pass wait for each of 8 ranks; both products wait alike."""
    waits = {}
    for seconds in (0.0, 1.0):
        job = with_engine(make_job("llama3-8b", gpus=32, batch=64), communication={"rank_wait": seconds})
        layout = parse_layout("tp=8,pp=4", num_layers=32, num_devices=32)
        passes = stage_prices(job, layout, stages_of(job, layout)).passes
        waits[seconds] = {name: np.broadcast_to(getattr(passes, name), 4)[1] for name in PASSES}  # a stage without ends
    long, short = waits[1.0], waits[0.0]
    assert long["forward"] == pytest.approx(8 * 4 * 8, rel=1e-3)
    assert long["backward_input"] + long["backward_weight"] == pytest.approx(8 * 6 * 8, rel=1e-3)
    of_weights = [
        each["backward_weight"] / (each["backward_input"] + each["backward_weight"]) for each in (long, short)
    ]
    assert of_weights[0] == pytest.approx(of_weights[1], rel=0.25)  # collectives are no part of the products
    one_stage = with_engine(make_job("llama3-8b", gpus=8, batch=64), communication={"rank_wait": 1.0})
    for text, least in (("tp=8", 8 * 4 * 32), ("dp=8", 0)):
        layout = parse_layout(text, num_layers=32, num_devices=8)
        waited = float(np.sum(stage_prices(one_stage, layout, stages_of(one_stage, layout)).passes.forward))
        assert least <= waited < least + 1.0, text


@pytest.mark.parametrize("bandwidth", ["450 GB/s", "2 GB/s"])
def test_inputs_are_gathered_again_beside_the_gradients_of_inputs(make_job, with_engine, bandwidth):
    """Two gathers in each of 32 layers: wholly hidden on a fast link, on a slow one by half of the products."""
    layout = parse_layout("tp=8,sp=1", num_layers=32, num_devices=8)
    busy, exposed = {}, {}
    for again in (False, True):
        job = make_job("llama3-8b", gpus=8, batch=8, settings=(f"nvlink.bandwidth={bandwidth}",))
        job = with_engine(job, memory={"regathers_inputs": again}, overlap={"weight_gradients": False})
        prices = stage_prices(job, layout, stages_of(job, layout))
        busy[again], exposed[again] = (
            float(np.sum(each)) for each in (prices.tp_comm, prices.tp_comm - prices.tp_hidden)
        )
        products = float(np.sum(prices.passes.backward_weight))  # about those of the gradients of inputs
    more, left = busy[True] - busy[False], exposed[True] - exposed[False]
    assert more == pytest.approx(busy[False] * 2 * 32 / (8 * 32 + 4), rel=1e-6)
    if bandwidth == "450 GB/s":
        assert left == pytest.approx(0, abs=1e-9)
    else:
        assert more - left == pytest.approx(products / 2, rel=0.2)


def test_recompute_of_a_block_repeats_the_collectives_of_the_layers_that_have_it(make_job):
    """One of four layers is dense: recompute of `mlp` repeats half of its collectives, that of `moe` of the others."""
    settings = ("model.num_layers=4", "model.moe.num_dense_layers=1", "model.mtp_layers=0")
    job = make_job("deepseek-v3", engine="megatron", gpus=8, settings=settings)
    seconds = {}
    for policy in ("none", "mlp", "moe", "mlp+moe", "full"):
        layout = parse_layout(f"tp=4,ep=2,sp=1,recompute={policy}", num_layers=4, num_devices=8)
        seconds[policy] = float(np.sum(stage_prices(job, layout, stages_of(job, layout)).tp_comm))
    added = {policy: each - seconds["none"] for policy, each in seconds.items()}
    assert added["moe"] == pytest.approx(3 * added["mlp"])
    assert added["mlp+moe"] == pytest.approx(added["mlp"] + added["moe"])
    assert added["full"] == pytest.approx(2 * added["mlp+moe"])
