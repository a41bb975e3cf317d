"""The estimate as a whole: sums, broadcasting, monotonicity, and the published table that no constant was fitted on."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.estimate import estimate
from planner.cost.flops import sc21_flops_per_step
from planner.cost.ledger import LineName, total_exposed_seconds
from planner.cost.prices import stage_bytes, stage_prices
from planner.cost.stage import POLICIES, Stage, stages_of
from planner.layout import parse_layout
from planner.search.degrees import DegreeArrays

TABLE = yaml.safe_load((Path(__file__).parents[1] / "published" / "sc21_table1.yaml").read_text())

LAYOUTS = st.builds(
    lambda tp, pp, dp, zero, mbs, v, recompute: (
        f"tp={tp},pp={pp},dp={dp},zero={zero if pp == 1 else min(zero, 1)},mbs={mbs},"
        f"interleave={v if pp > 1 else 1},recompute={recompute}"
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "full"]),
)
ENGINES = st.sampled_from(["torch", "megatron"])


def priced(job, text):
    return estimate(job, parse_layout(text, num_layers=job.model.num_layers, num_devices=256))


def test_sc21_table_1(make_job):
    errors = []
    for row in TABLE["rows"]:
        job = make_job(
            row["model"],
            gpus=row["gpus"],
            batch=row["batch"],
            precision="fp16",
            engine="megatron-2021",
            settings=("training.attention=unfused", "training.dropout=0.1"),
        )
        text = f"tp={row['tp']},pp={row['pp']},mbs={row['mbs']},interleave={row['interleave']},sp=0,recompute=full"
        layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=row["gpus"])
        measured = sc21_flops_per_step(job.model, job.training) / row["gpus"] / (row["tflops"] * 1e12)
        errors.append(abs(measured / estimate(job, layout).step_seconds - 1))
    assert np.mean(errors) <= TABLE["accepted"]["mean_absolute_error"]
    assert np.max(errors) <= TABLE["accepted"]["worst_absolute_error"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LAYOUTS, ENGINES)
def test_totals_are_sums_of_their_lines(make_job, text, engine):
    job = make_job("llama3-8b", engine=engine, gpus=256, batch=64)
    e = priced(job, text)
    assert e.step_seconds == pytest.approx(sum(x.busy_seconds - x.hidden_seconds for x in e.time), rel=1e-12)
    for stage in e.memory:
        assert stage.total_bytes == pytest.approx(sum(x.num_bytes for x in stage.lines), rel=1e-12)
    for line in e.time:
        assert 0 <= line.hidden_seconds <= line.busy_seconds
        assert line.formula
        assert line.source
    assert 0 < e.mfu <= e.hfu <= 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LAYOUTS, ENGINES)
def test_the_step_is_the_pipeline_formula_over_the_stage_prices(make_job, text, engine):
    job = make_job("llama3-8b", engine=engine, gpus=256, batch=64)
    layout = parse_layout(text, num_layers=32, num_devices=256)
    prices = stage_prices(job, layout, stages_of(job, layout))
    each = np.broadcast_to(prices.microbatch_seconds, (layout.pp,))
    m, v = 64 / layout.dp / layout.mbs, layout.interleave
    tail = np.max(np.broadcast_to(prices.tail_seconds, (layout.pp,)))
    assert estimate(job, layout).step_seconds == pytest.approx(
        m * each.max() + (each.sum() - each.max()) / v + tail, rel=1e-12
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(LAYOUTS, min_size=2, max_size=6), ENGINES)
def test_many_layouts_at_once_cost_what_each_costs_alone(make_job, texts, engine):
    job = make_job("llama3-8b", engine=engine, gpus=256, batch=64)
    layouts = [parse_layout(t, num_layers=32, num_devices=256) for t in texts]
    layouts = [x for x in layouts if x.schedule == layouts[0].schedule]
    names = [f.name for f in fields(DegreeArrays) if f.name not in ("schedule", "offload")]
    arrays = DegreeArrays(
        **{name: np.array([getattr(x, name) for x in layouts]) for name in names}, schedule=layouts[0].schedule
    )
    stage = Stage(index=0, num_layers=np.array([x.layers_of_stage(0) for x in layouts]), policy=2)
    together = stage_prices(job, arrays, stage)
    num_bytes = np.broadcast_to(stage_bytes(job, arrays, stage), (len(layouts),))
    for i, layout in enumerate(layouts):
        one = Stage(index=0, num_layers=layout.layers_of_stage(0), policy=2)
        alone = stage_prices(job, layout, one)
        for name in ("microbatch_seconds", "tail_seconds"):
            both = np.broadcast_to(getattr(together, name), (len(layouts),))
            assert both[i] == pytest.approx(float(getattr(alone, name)), rel=1e-12)
        assert num_bytes[i] == pytest.approx(float(stage_bytes(job, layout, one)), rel=1e-12)


BETTER = [
    "nvlink.bandwidth=600 GB/s",
    "infiniband.bandwidth=50 GB/s",
    "infiniband.latency=1 us",
    "device.memory_bandwidth=4 TB/s",
    "device.efficiency.matmul=0.95",
    "device.efficiency.launch=0 us",
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LAYOUTS, ENGINES, st.sampled_from(BETTER))
def test_better_hardware_is_never_slower(make_job, text, engine, better):
    base = make_job("llama3-8b", engine=engine, gpus=256, batch=64)
    improved = make_job("llama3-8b", engine=engine, gpus=256, batch=64, settings=(better,))
    assert priced(improved, text).step_seconds <= priced(base, text).step_seconds * (1 + 1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(LAYOUTS, ENGINES)
def test_recompute_costs_time_and_never_activations(make_job, text, engine):
    job = make_job("llama3-8b", engine=engine, gpus=256, batch=64)
    none, full = (priced(job, text.rsplit(",", 1)[0] + f",recompute={policy}") for policy in ("none", "full"))
    assert full.step_seconds > none.step_seconds
    assert full.hfu * full.step_seconds > none.hfu * none.step_seconds
    for a, b in zip(none.memory, full.memory, strict=True):
        stored = [next(x.num_bytes for x in s.lines if x.name == LineName.ACTIVATIONS) for s in (a, b)]
        assert stored[1] < stored[0]


def test_one_device_communicates_nothing(make_job):
    job = make_job("llama3-8b", engine="torch", gpus=1, batch=8)
    e = priced(job, "dp=1")
    quiet = (LineName.TP_COMM, LineName.PP_COMM, LineName.DP_COMM, LineName.BUBBLE, LineName.TIED_EMBEDDING)
    assert total_exposed_seconds(x for x in e.time if x.name in quiet) == 0


def test_the_bubble_vanishes_as_microbatches_grow(make_job):
    shares = []
    for batch in (8, 64, 512):
        e = priced(make_job("llama3-8b", engine="torch", gpus=256, batch=batch), "tp=1,pp=4,dp=1")
        shares.append(next(x.busy_seconds for x in e.time if x.name == LineName.BUBBLE) / e.step_seconds)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.01


def test_tensor_parallelism_across_nodes_is_dear(make_job):
    job = make_job("llama3-70b", engine="torch", gpus=256, batch=64)
    inside, across = (priced(job, f"tp={tp},pp=1,dp={256 // tp},mbs=1") for tp in (8, 16))
    comm = [next(x.exposed_seconds for x in e.time if x.name == LineName.TP_COMM) for e in (inside, across)]
    assert comm[1] > 2 * comm[0]


def test_policies_are_indexed_as_named():
    assert POLICIES == ("none", "selective", "full")


OVERLAPS = ("overlaps_tensor_parallel", "overlaps_interleaved_sends", "dispatches_once_per_host")


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("text", ["tp=8,pp=2", "tp=4,pp=4,interleave=2", "tp=1,pp=2,ep=8", "tp=2,pp=4,recompute=full"])
def test_what_an_engine_overlaps_only_hides_time(make_job, text, overlap):
    job = make_job("mixtral-8x7b", cluster="dgx-h100", engine="megatron", gpus=256, batch=256)
    off, on = (replace(job, engine=job.engine.model_copy(update={overlap: value})) for value in (False, True))
    without, with_it = priced(off, text), priced(on, text)
    assert with_it.step_seconds <= without.step_seconds
    if overlap != "dispatches_once_per_host":
        assert [line.busy_seconds for line in with_it.time][:7] == [line.busy_seconds for line in without.time][:7]


def test_a_piece_of_an_overlapped_collective_shows(make_job):
    job = make_job("llama3-70b", cluster="dgx-h100", engine="megatron-bridge", gpus=256, batch=256)
    for tp in (2, 4, 8):
        line = next(x for x in priced(job, f"tp={tp},pp=4").time if x.name == LineName.TP_COMM)
        assert line.hidden_seconds <= line.busy_seconds * (1 - 1 / tp)
        assert line.exposed_seconds >= line.busy_seconds / tp


def test_sends_hide_only_between_chunks(make_job):
    job = make_job("gpt3-175b", engine="megatron", gpus=256, batch=256)
    for text, hides in (("tp=8,pp=4", False), ("tp=8,pp=4,interleave=2", True)):
        line = next(x for x in priced(job, text).time if x.name == LineName.PP_COMM)
        assert (line.hidden_seconds == line.busy_seconds > 0) is hides
