"""All schedules of one layout, compared with each other, with the textbook, and with their executions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.activations import stored_activation_bytes
from planner.cost.estimate import estimate, timeline
from planner.cost.ledger import LineName
from planner.cost.prices import chunk_parts, stage_prices
from planner.cost.schedule_comparison import SCHEDULES, compare_schedules, with_schedule
from planner.cost.stage import stages_of
from planner.layout_text import parse_layout


def line(priced, name):
    return next(x for x in priced.time if x.name == name)


def priced_job(make_job, draw, *, batches):
    job = make_job(draw(st.sampled_from(["llama3-8b", "gpt2-xl"])), gpus=16, batch=draw(batches), sequence=1024)
    pp, policy = draw(st.sampled_from([2, 4])), draw(st.sampled_from(["none", "full"]))
    first = job.model.num_layers // pp + draw(st.integers(-2, 2))
    rest = (job.model.num_layers - first) // (pp - 1)
    layers = [first, *[rest] * (pp - 2)]
    layers.append(job.model.num_layers - sum(layers))
    text = f"tp=2,pp={pp},dp=1,recompute={policy},layers_per_stage={'/'.join(map(str, layers))}"
    return job, parse_layout(text, num_layers=job.model.num_layers, num_devices=16)


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "mixtral-8x7b"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ledger_is_the_execution(make_job, model, schedule):
    """All stages have equally many layers; the head makes the last stage slowest, so 1F1B's closed form is exact."""
    job = make_job(model, gpus=16, batch=32, sequence=1024)
    text = f"tp=2,pp=4,dp=2,mbs=1,schedule={schedule}" + (",interleave=2" if schedule == "interleaved" else "")
    layout = parse_layout(text, num_layers=job.model.num_layers, num_devices=16)
    priced = estimate(job, layout)
    run = timeline(job, layout)
    if schedule == "pipedream":
        assert line(priced, LineName.BUBBLE).busy_seconds == 0
        assert priced.pipeline_seconds < run.seconds  # which fills the pipeline, once in a training run
        return
    assert priced.pipeline_seconds == pytest.approx(run.seconds, rel=5e-3 if schedule == "interleaved" else 1e-9)
    assert priced.step_seconds == pytest.approx(priced.pipeline_seconds + priced.tail_seconds)
    assert np.all(run.busy_seconds <= priced.pipeline_seconds * (1 + 1e-9))


@settings(max_examples=25)
@given(st.data())
def test_schedules_keep_their_order(make_job, data):
    job, layout = priced_job(make_job, data.draw, batches=st.sampled_from([16, 32, 48]))
    found = compare_schedules(job, layout)
    assert tuple(found) == SCHEDULES
    outcomes = {schedule: outcome for schedule, outcome in found.items() if not isinstance(outcome, str)}
    assert set(outcomes) >= set(SCHEDULES) - {"interleaved"}
    time = {schedule: outcome.pipeline_seconds for schedule, outcome in outcomes.items()}
    slack = 1 + 1e-9
    assert all(time[each] <= time["1f1b"] * slack for each in ("zb-h1", "pipedream"))
    # of a V both ends of the model lie on the first stage, which can make it the slowest: compare what is waited
    assert outcomes["zbv"].bubble_share <= outcomes["1f1b"].bubble_share * slack
    assert time["gpipe"] >= time["1f1b"] / slack
    assert all(seconds <= time["naive"] * slack for seconds in time.values())
    assert outcomes["1f1b"].executed_step_seconds <= outcomes["1f1b"].step_seconds * slack
    assert outcomes["gpipe"].activation_bytes >= outcomes["1f1b"].activation_bytes
    assert outcomes["naive"].activation_bytes <= min(x.activation_bytes for x in outcomes.values()) * slack
    assert outcomes["pipedream"].staleness_steps == layout.pp - 1 == outcomes["pipedream"].weight_versions - 1
    assert all(x.staleness_steps == 0 for schedule, x in outcomes.items() if schedule != "pipedream")
    for schedule, outcome in outcomes.items():
        assert outcome.utilization == pytest.approx(1 / (1 + outcome.bubble_share))
        assert outcome.layout.schedule == schedule
        stages = [outcome.layout.layers_of_stage(r) for r in range(layout.pp)]
        assert stages == [layout.layers_of_stage(r) for r in range(layout.pp)]
        assert outcome.runs == (schedule in job.engine.pipeline.schedules)


@settings(max_examples=15)
@given(st.data())
def test_without_recompute_zbv_stores_as_much_as_the_first_stage_of_1f1b(make_job, data):
    """ZBV's chunks are half as long, and twice as many are in flight: no stage holds more than 1F1B's fullest."""
    job, layout = priced_job(make_job, data.draw, batches=st.sampled_from([16, 32]))
    even = ["none"] * layout.pp
    layout = replace(layout, recompute=tuple(even), layers_per_stage=(job.model.num_layers // layout.pp,) * layout.pp)
    found = compare_schedules(job, layout)
    assert found["zbv"].activation_bytes <= found["1f1b"].activation_bytes * (1 + 1e-9)
    assert found["zb-h1"].activation_bytes == pytest.approx(found["1f1b"].activation_bytes)


@settings(max_examples=25)
@given(st.data(), st.sampled_from(SCHEDULES))
def test_more_microbatches_never_raise_the_share_of_the_bubble(make_job, data, schedule):
    job, layout = priced_job(make_job, data.draw, batches=st.just(16))
    other = with_schedule(layout, schedule)
    shares = []
    for batch in (16, 32, 128):
        many = replace(job, training=job.training.model_copy(update={"global_batch_size": batch}))
        priced = estimate(many, other)
        shares.append(line(priced, LineName.BUBBLE).busy_seconds / priced.pipeline_seconds)
    if schedule == "naive":
        assert shares == pytest.approx([shares[0]] * 3)
    else:
        assert shares[0] >= shares[1] - 1e-12 >= shares[2] - 2e-12
        assert shares[2] <= shares[0] / 4 + 1e-12


@pytest.mark.parametrize("interleave", [2, 4, 8])
def test_interleaving_lowers_the_bubble_and_raises_what_is_stored(make_job, interleave):
    job = make_job("llama3-8b", gpus=16, batch=32)
    one, several = (
        estimate(job, parse_layout(f"pp=4,dp=2,interleave={v}", num_layers=32, num_devices=8)) for v in (1, interleave)
    )
    bubble = [line(each, LineName.BUBBLE).busy_seconds for each in (one, several)]
    assert bubble[1] < bubble[0] / interleave * 1.05
    stored = [each.memory[0].lines[3].num_bytes for each in (one, several)]
    assert stored[1] == pytest.approx(stored[0] * (1 + 3 / (4 * interleave)))  # p (1 + (p - 1) / (p v)) of p


def test_textbook_figures(make_job):
    """Bubbles: (p - 1) / m of GPipe and 1F1B, (p - 1) / (v m) of interleaved; stages in use: m / (m + p - 1)."""
    job = make_job("llama3-8b", gpus=4, batch=32)
    layout = parse_layout("pp=4,dp=1,interleave=2", num_layers=32, num_devices=4)
    found = compare_schedules(job, layout)
    assert found["gpipe"].equal_stages_bubble_share == pytest.approx(3 / 32)
    assert found["1f1b"].equal_stages_bubble_share == pytest.approx(3 / 32)
    assert found["interleaved"].equal_stages_bubble_share == pytest.approx(3 / (2 * 32))
    assert found["naive"].equal_stages_bubble_share == pytest.approx(3)
    assert found["1f1b"].bubble_share == pytest.approx(found["gpipe"].bubble_share)
    assert found["1f1b"].bubble_share < 3 / 32  # the head makes the last stage slower
    assert found["1f1b"].utilization == pytest.approx(32 / (32 + 3), rel=0.03)
    assert found["gpipe"].activation_bytes == pytest.approx(8 * found["1f1b"].activation_bytes)


def test_a_schedule_without_an_order_says_why(make_job):
    job = make_job("llama3-8b", gpus=16, batch=4)
    found = compare_schedules(job, parse_layout("pp=16,dp=1", num_layers=32, num_devices=16))
    assert found["dualpipev"] == "it needs at least 32 microbatches, not 4"
    short = compare_schedules(job, parse_layout("pp=32,dp=1", num_layers=32, num_devices=32))
    assert short["zbv"] == short["interleaved"] == "a stage has fewer layers than chunks"
    assert not isinstance(short["zb-h1"], str)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_stored_activations_are_those_of_the_execution(make_job, schedule, policy):
    """Each chunk holds its kept tensors from F to I; if the schedule separates I and W, all tensors from I to W."""
    job = make_job("llama3-8b", gpus=8, batch=24)
    text = f"pp=4,dp=1,recompute={policy},schedule={schedule}" + (",interleave=2" if schedule == "interleaved" else "")
    layout = parse_layout(text, num_layers=32, num_devices=8)
    closed = np.broadcast_to(stored_activation_bytes(job, layout, stages_of(job, layout), 24), layout.pp)
    run = timeline(job, layout)
    whole = stored_activation_bytes(
        job,
        replace(layout, schedule="naive"),
        stages_of(job, replace(layout, recompute=("none",) * layout.num_chunks)),
        24,
    )[0]
    kept = stored_activation_bytes(job, replace(layout, schedule="naive"), stages_of(job, layout), 24)[0]
    for stage in range(layout.pp):
        before = waiting = peak = 0.0
        for kind in run.kind[run.stage == stage]:
            before += {"F": 1, "B": -1, "I": -1}.get(str(kind), 0) * kept / layout.interleave
            waiting += {"I": 1, "W": -1}.get(str(kind), 0) * whole / layout.interleave
            peak = max(peak, before + waiting)
        assert closed[stage] == pytest.approx(peak)


def test_pipedream_stashes_weights_and_updates_after_every_microbatch(make_job):
    job = make_job("llama3-8b", gpus=8, batch=16)
    layout = parse_layout("pp=4,dp=2", num_layers=32, num_devices=8)
    flushed, stale = (estimate(job, with_schedule(layout, schedule)) for schedule in ("1f1b", "pipedream"))
    weights = [[stage.lines[0].num_bytes for stage in each.memory] for each in (flushed, stale)]
    assert [b / a for a, b in zip(*weights, strict=True)] == [4, 3, 2, 1]
    updates = [line(each, LineName.OPTIMIZER).busy_seconds for each in (flushed, stale)]
    assert updates[1] == pytest.approx(8 * updates[0])


def test_the_timeline_uses_the_seconds_of_every_chunk(make_job):
    job = make_job("gpt2-xl", gpus=8, batch=16, sequence=1024)
    layout = parse_layout("pp=4,dp=1,schedule=zbv", num_layers=job.model.num_layers, num_devices=8)
    run, forward = timeline(job, layout), sum(each.forward for each in chunk_parts(job, layout).values())
    first = (run.kind == "F") & (run.microbatch == 0)
    spent = (run.end - run.start)[first]
    assert spent[np.argsort(run.chunk[first])] == pytest.approx(forward)
    work = 16 * np.broadcast_to(stage_prices(job, layout, stages_of(job, layout)).microbatch_seconds, 4)
    assert run.busy_seconds == pytest.approx(work)
