"""The layers that a stage holds, and their cost, compared with loops over single layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.cost.estimate import estimate, timeline
from planner.cost.layers import layer_seconds
from planner.cost.prices import chunk_parts, stage_prices
from planner.cost.stage import (
    Stage,
    chunks_of,
    kinds_of_model,
    layer_kinds,
    pattern_of,
    stage_of,
    stages_of,
    timed_kinds,
)
from planner.layout import Layout, even_stages, of_chunks, stage_of_chunk
from planner.layout_text import parse_layout
from planner.specs.blocks import MixtureOfExperts

SCHEDULES = ("1f1b", "interleaved", "zbv")


@st.composite
def stacks(draw):
    """Values that determine the kinds of layers of a small model."""
    layers = draw(st.integers(4, 13))
    experts = draw(st.booleans())
    return {
        "num_layers": layers,
        "sliding_window": draw(st.sampled_from([0, 16, 4096])),
        "global_every": draw(st.integers(0, 5)),
        "moe": {
            "num_experts": 4,
            "experts_per_token": 2,
            "ffn_hidden_size": 64,
            "num_dense_layers": draw(st.integers(0, 3)),
            "layer_frequency": draw(st.integers(1, layers - 3)),
        }
        if experts
        else None,
    }


def job_with(make_job, stack, sequence=64):
    job = make_job("tiny-llama", gpus=64, batch=64, sequence=sequence)
    moe = None if stack["moe"] is None else MixtureOfExperts(**stack["moe"])
    return replace(job, model=job.model.model_copy(update={**stack, "moe": moe}))


def kind_of(job, number):
    """Whether a layer has experts, and whether it has a window that is shorter than the sequences."""
    return job.model.layer_has_experts(number), 0 < job.model.window_of_layer(number) < job.training.sequence_length


@st.composite
def layouts(draw, num_layers):
    schedule = draw(st.sampled_from(SCHEDULES))
    v = {"1f1b": 1, "interleaved": draw(st.integers(2, 3)), "zbv": 2}[schedule]
    pp = draw(st.integers(1, num_layers // v))
    cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=pp * v - 1, max_size=pp * v - 1)))
    layers = np.diff([0, *cuts, num_layers])
    recompute = ("none",) * (pp * v)
    return Layout(pp=pp, interleave=v, schedule=schedule, layers_per_stage=tuple(layers.tolist()), recompute=recompute)


@given(st.data())
def test_a_stage_holds_the_layers_that_a_loop_over_them_counts(make_job, data):
    job = job_with(make_job, data.draw(stacks()))
    layout = data.draw(layouts(job.model.num_layers))
    of_stages, of_chunks_ = ([Counter() for _ in range(count)] for count in (layout.pp, layout.num_chunks))
    number = 0
    for chunk, count in enumerate(layout.layers_per_stage):
        for _ in range(count):
            of_chunks_[chunk][kind_of(job, number)] += 1
            of_stages[int(stage_of_chunk(layout.schedule, layout.pp, chunk))][kind_of(job, number)] += 1
            number += 1
    for shape, expected in ((stages_of(job, layout), of_stages), (chunks_of(job, layout), of_chunks_)):
        length = len(expected)
        for kind, counts in timed_kinds(job, layout, shape):
            assert np.broadcast_to(counts, length).tolist() == [each[kind] for each in expected]
        for has_experts, counts in layer_kinds(job, layout, shape):
            wanted = [each[has_experts, False] + each[has_experts, True] for each in expected]
            assert np.broadcast_to(counts, length).tolist() == wanted
    whole = sum(of_stages, Counter())
    assert {(kind.has_experts, kind.is_local): kind.number for kind in kinds_of_model(job)} == dict(whole)


def test_a_stage_without_counts_of_kinds_has_plain_layers_only():
    stage = Stage(index=0, num_layers=5, policy=0)
    kinds = [(has_experts, is_local) for has_experts in (False, True) for is_local in (False, True)]
    assert [stage.number_of(*kind) for kind in kinds] == [5, 0, 0, 0]


@given(st.data())
def test_a_stage_of_the_search_holds_what_one_of_the_layout_does(make_job, data):
    job = job_with(make_job, data.draw(stacks()))
    layers, pattern = job.model.num_layers, pattern_of(job)
    first = data.draw(st.integers(0, layers))
    count = data.draw(st.integers(0, layers - first))
    state = int(pattern.state(first))
    assert state == min(p for p in range(layers + 1) if pattern.state(p) == state)
    assert [p for p in range(99) if pattern.state(p) == state] == list(range(state, 99, int(pattern.stride(state))))
    expected = Counter(kind_of(job, number) for number in range(first, first + count))
    for begin in (first, state):
        stage = stage_of(job, index=1, num_layers=count, policy=0, first=begin)
        assert {kind: stage.number_of(*kind) for kind in expected} == dict(expected)
        assert stage.num_layers == count


@given(st.data())
def test_several_chunks_of_the_even_split_hold_what_the_layout_says(make_job, data):
    job = job_with(make_job, data.draw(stacks()))
    layers, pattern = job.model.num_layers, pattern_of(job)
    schedule = data.draw(st.sampled_from(["interleaved", "zbv"]))
    pp = data.draw(st.integers(1, layers // 2))
    v = data.draw(st.integers(2, layers // pp)) if schedule == "interleaved" else 2
    stages = even_stages(layers, pp)
    if schedule == "interleaved":  # what the search knows of them
        assume(stages[0] // v >= pattern.leading)
        assume(pattern.period == 1 or (pattern.leading == 0 and layers % (pp * v * pattern.period) == 0))
    parts = [[k // v + (j < k % v) for k in stages] for j in range(v)]
    of_layout = [parts[c // pp][int(stage_of_chunk(schedule, pp, c))] for c in range(pp * v)]
    recompute = of_chunks(("none",) * pp, v, schedule)
    layout = Layout(pp=pp, interleave=v, schedule=schedule, layers_per_stage=tuple(of_layout), recompute=recompute)
    found = stage_of(job, index=np.arange(pp), num_layers=np.array(stages), policy=0, layout=layout)
    wanted = stages_of(job, layout)
    for has_experts in (False, True):
        for is_local in (False, True):
            counts = (np.broadcast_to(each.number_of(has_experts, is_local), pp).tolist() for each in (found, wanted))
            assert next(counts) == next(counts)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("text", ["pp=4,layers_per_stage=5/11/17/14", "pp=3,interleave=2", "pp=2,schedule=zbv"])
@pytest.mark.parametrize(
    ("name", "sequence"), [("llama4-maverick", 65536), ("gpt-oss-20b", 16384), ("gemma3-4b", 32768)]
)
def test_a_stage_computes_for_as_long_as_its_layers_one_by_one(make_job, name, sequence, text, policy):
    job = make_job(name, gpus=64, batch=64, sequence=sequence, settings=("model.num_layers=47",))
    layout = parse_layout(f"{text},recompute={policy}", num_layers=47, num_devices=64)
    wanted, number = np.zeros(layout.pp), 0
    for chunk, count in enumerate(layout.layers_per_stage):
        for _ in range(count):
            has_experts, is_local = kind_of(job, number)
            passes = layer_seconds(job, layout, experts=has_experts, local=is_local).passes
            wanted[int(stage_of_chunk(layout.schedule, layout.pp, chunk))] += float(passes.total)
            number += 1
    assert np.ptp(wanted) > 0
    assert stage_prices(job, layout, stages_of(job, layout)).compute == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "sequence"), [("llama4-maverick", 65536), ("gemma3-4b", 65536), ("deepseek-v3", 4096)]
)
@pytest.mark.parametrize("text", ["pp=4,layers_per_stage=1/2/20/25", "pp=2,schedule=gpipe"])
def test_the_step_is_as_long_as_its_passes_executed(make_job, name, sequence, text):
    """With one chunk per stage, the closed form is never shorter than the executed passes."""
    job = make_job(name, gpus=64, batch=64, sequence=sequence, settings=("model.num_layers=48",))
    layout = parse_layout(text, num_layers=48, num_devices=64)
    executed, priced = timeline(job, layout).seconds, estimate(job, layout).pipeline_seconds
    assert executed <= priced * (1 + 1e-12)
    busiest = sum(part.total for part in chunk_parts(job, layout).values()).max()
    assert busiest * layout.num_microbatches(64) <= executed * (1 + 1e-12)


@pytest.mark.parametrize(("name", "sequence"), [("gpt-oss-20b", 65536), ("gemma3-4b", 65536)])
@pytest.mark.parametrize("layers", ["6/6/6/6", "5/7/6/6", "7/6/6/5"])
def test_an_interleaved_step_is_as_long_as_its_passes_executed(make_job, name, sequence, layers):
    """Chunks of whole periods are alike and have a closed form; chunks of different kinds have none."""
    job = make_job(name, gpus=64, batch=64, sequence=sequence, settings=("model.num_layers=24",))
    layout = parse_layout(f"pp=2,interleave=2,layers_per_stage={layers}", num_layers=24, num_devices=64)
    executed = timeline(job, layout).seconds
    assert estimate(job, layout).pipeline_seconds == pytest.approx(executed, rel=1e-9)
