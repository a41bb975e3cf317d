"""The estimate as a whole: sums, broadcasting, monotonicity, and the published table that no constant was fitted on."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.estimate import estimate, timeline
from planner.cost.flops import sc21_flops_per_step
from planner.cost.layers import layer_seconds
from planner.cost.ledger import LineName, total_exposed_seconds
from planner.cost.prices import stage_bytes, stage_parts, stage_prices
from planner.cost.stage import Stage, held_params, stages_of
from planner.layout_text import parse_layout
from planner.search.space.configurations import DegreeArrays
from planner.specs.calibration import UNCALIBRATED

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
    names = [f.name for f in fields(DegreeArrays) if f.name not in ("placement", "schedule", "offload", "recompute")]
    degrees = {name: np.array([getattr(x, name) for x in layouts]) for name in names}
    rest = {name: np.zeros(len(layouts), dtype=int) for name in ("placement", "recompute")}
    arrays = DegreeArrays(**degrees, **rest, schedule=layouts[0].schedule)
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


HIDES = [
    ("overlap", {"tensor_parallel": True}),
    ("overlap", {"pipeline_sends": "interleaved"}),
    ("communication", {"dispatches_once_per_host": True}),
]
NOTHING_HIDDEN = {
    "overlap": {"tensor_parallel": False, "pipeline_sends": "none"},
    "communication": {"dispatches_once_per_host": False},
}


@pytest.mark.parametrize(("part", "hides"), HIDES)
@pytest.mark.parametrize("text", ["tp=8,pp=2", "tp=4,pp=4,interleave=2", "tp=1,pp=2,ep=8", "tp=2,pp=4,recompute=full"])
def test_what_an_engine_overlaps_only_hides_time(make_job, with_engine, text, part, hides):
    """Collectives that nothing hides shorten the wait for the host, so it is off where busy seconds are alike."""
    for options in ((), ("device.efficiency.layer_floor=0 us",)):
        job = make_job("mixtral-8x7b", cluster="dgx-h100", engine="megatron", gpus=256, batch=256, settings=options)
        off = with_engine(job, **NOTHING_HIDDEN)
        without, with_it = priced(off, text), priced(with_engine(off, **{part: hides}), text)
        assert with_it.step_seconds <= without.step_seconds
    if part == "overlap":
        assert [line.busy_seconds for line in with_it.time][:7] == [line.busy_seconds for line in without.time][:7]


@pytest.mark.parametrize("engine", ["hai-llm", "megatron", "torch"])
def test_pairs_of_passes_hide_exchanges_and_sends_and_the_ledger_ends_with_the_execution(make_job, with_engine, engine):
    settings = ("engine.pipeline.schedules=[dualpipev]", "engine.can.model_features=[moe, mla, mtp]")
    job = make_job("deepseek-v3", cluster="hgx-h800", engine=engine, gpus=256, batch=1024, settings=settings)
    layout = parse_layout("pp=4,ep=32,zero=1,schedule=dualpipev", num_layers=61, num_devices=256)
    found = estimate(job, layout)
    assert found.pipeline_seconds == pytest.approx(timeline(job, layout).seconds)
    line = next(x for x in found.time if x.name == LineName.EP_COMM)
    assert 0 <= line.hidden_seconds <= line.busy_seconds
    assert (line.hidden_seconds > 0) is (engine == "hai-llm")
    apart = with_engine(job, overlap={"paired_passes": False})
    assert found.step_seconds <= estimate(apart, layout).step_seconds


def test_deepseek_v3_as_it_was_trained(make_job):
    """2,048 H800 took 19.9 s a step (Zhao et al., ISCA 2025, table 4): DualPipe on 16 stages, the last with one layer.

    The report's 2.664 million device hours for 14.8 T tokens, in steps of 15,360 sequences, give the same step time.
    """
    assert pytest.approx(19.926, rel=0.01) == 2.664e6 * 3600 / 2048 / (14.8e12 / (15360 * 4096))
    job = make_job(
        "deepseek-v3", cluster="hgx-h800", engine="hai-llm", gpus=2048, batch=15360, sequence=4096, precision="fp8"
    )
    text = "pp=16,ep=64,zero=1,schedule=dualpipe,recompute=selective"
    for layers in (",layers_per_stage=4/4/4/4/4/4/4/4/4/4/4/4/4/4/4/1", ""):
        layout = parse_layout(text + layers, num_layers=61, num_devices=2048)
        assert (layout.pp, layout.dp, layout.interleave, layout.schedule) == (8, 256, 2, "dualpipev")
        found = estimate(job, layout)
        assert found.step_seconds == pytest.approx(19.926, rel=0.14)
        if layers:
            assert found.verdict != "does not fit"


def test_a_send_of_one_pair_of_ranks_is_slower_than_the_link(make_job, with_engine):
    """With scatter and gather, a rank sends an eighth of 2 s b h bytes at `send_share`; NVLink gathers the parts."""
    job = make_job("gpt3-175b", engine="megatron-2021", gpus=96, batch=96, precision="fp16")
    lines = {}
    for share in (1.0, 0.35):
        own = with_engine(job, communication={"send_share": share})
        lines[share] = next(x for x in priced(own, "tp=8,pp=12,dp=1,sp=0").time if x.name == LineName.PP_COMM)
    link = job.cluster.links[1]
    one = 2 * 2048 * 12288 / 8 / (link.bandwidth * link.efficiency)
    more = 2 * 96 * one * (1 / 0.35 - 1)  # there and back for 96 microbatches
    assert lines[0.35].busy_seconds - lines[1.0].busy_seconds == pytest.approx(more)


def test_scatter_and_gather_save_what_the_paper_says(make_job, with_engine):
    """Narayanan et al. (SC 2021), section 5.7: up to 11 % with interleaved stages, 175B parameters on 96 GPUs."""
    settings = ("training.attention=unfused", "training.dropout=0.1")
    job = make_job("gpt3-175b", engine="megatron-2021", gpus=96, batch=60, precision="fp16", settings=settings)
    whole = with_engine(job, communication={"scatters_pipeline_sends": False})
    text = "tp=8,pp=12,dp=1,sp=0,interleave=2,recompute=full"
    assert priced(whole, text).step_seconds / priced(job, text).step_seconds == pytest.approx(1.11, abs=0.01)


def test_copies_around_a_reduction_are_felt_once_a_step(make_job, with_engine):
    job = make_job("gpt3-175b", engine="megatron-2021", gpus=64, batch=64, precision="fp16")
    quiet = with_engine(job, compute={"reduction_bytes": 0})
    device = job.cluster.device
    for text, dp in (("tp=8,pp=4,dp=2,sp=0", 2), ("tp=8,pp=8,dp=1,sp=0", 1)):
        one, other = (priced(each, text) for each in (job, quiet))
        layout = parse_layout(text, num_layers=96, num_devices=64)
        held = max(np.broadcast_to(held_params(job, layout, stages_of(job, layout)).total, layout.pp))
        seconds = 12 * held / (device.memory_bandwidth * device.efficiency.memory) + device.efficiency.launch
        assert one.step_seconds - other.step_seconds == pytest.approx(seconds if dp > 1 else 0.0, rel=0.02, abs=1e-9)


def test_the_host_launches_every_hop_of_a_ring(make_job):
    """With two tokens a rank, a forward pass takes 300 us, and a third of that per hop; backward 1.6 times as much."""
    job = make_job("llama3-8b", cluster="dgx-h100", engine="megatron", gpus=512, sequence=128)
    job = replace(job, calibration=UNCALIBRATED)
    for cp in (2, 8, 64):  # with an eighth of the weights, the host takes longer than the sums of their gradients
        layout = parse_layout(f"tp=8,cp={cp},sp=0", num_layers=32, num_devices=512)
        found = layer_seconds(job, layout).passes
        assert float(found.forward) == pytest.approx(300e-6 * (1 + (cp - 1) / 3))
        assert float(found.backward) == pytest.approx(1.6 * float(found.forward))


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-next-80b-a3b"])
def test_the_device_waits_for_the_host_beside_exchanges_that_need_no_answer(make_job, with_engine, model):
    """With 128 tokens a rank, a layer with its exchange takes the host's time for launches, 6 x 300 us.

    A pair of passes hides nothing of this exchange, because the host needs its time for both. An all-to-all waits for
    the sizes of its parts, so its time is added. The same holds for the mean layer of several kinds.
    """
    job = make_job(model, cluster="dgx-h100", engine="megatron-bridge", gpus=16, sequence=128)
    job = replace(job, calibration=UNCALIBRATED)
    layout = parse_layout("ep=16,dp=16", num_layers=48, num_devices=16)
    for waits in (False, True):
        asked = with_engine(job, communication={"dispatches_once_per_host": not waits})
        layer = stage_parts(asked, layout).layers[True, False]
        exchange = layer.busy[LineName.EP_COMM].forward
        on_top = exchange if waits else 0.0
        assert exchange > 0
        assert float(layer.passes.forward + exchange) == pytest.approx(6 * 300e-6 + on_top)
        assert float(layer.passes.backward + exchange) == pytest.approx(1.6 * 6 * 300e-6 + on_top)
        assert (layer.hidden[LineName.EP_COMM].total > 1e-9) == waits


def test_a_long_sequence_is_not_spread_over_more_ranks_than_pays(make_job):
    """Meta trained 405B parameters at 131,072 tokens on 16,384 H100 with tp=8, cp=16, pp=16, dp=8 at 380 TFLOP/s.

    Source: Llama 3 (2024), table 4, with attention counted as a full square (PaLM, appendix B). Twice as many ranks in
    the ring gain little, and eight times as many lose.
    """
    job = make_job("llama3-405b", cluster="dgx-h100", engine="megatron", gpus=16384, batch=128, sequence=131072)
    cut = "tp=8,cp={},pp=16,dp={},zero=1,interleave=2"
    seconds = {cp: priced(job, cut.format(cp, 128 // cp)).step_seconds for cp in (16, 32, 64, 128)}
    h, s, tokens = 16384, 131072, 131072 * 128
    flops = (6 * 405.8e9 + 12 * 126 * h * s) * tokens
    assert flops / 16384 / 380e12 == pytest.approx(seconds[16], rel=0.12)
    assert seconds[32] < seconds[16] < seconds[128]
    assert seconds[32] < seconds[64]


def test_a_piece_of_an_overlapped_collective_shows(make_job):
    """Of 10 collectives in a layer 2 gather inputs again as a whole, beside a product (ub_bulk_dgrad), 8 in pieces."""
    job = make_job("llama3-70b", cluster="dgx-h100", engine="megatron-bridge", gpus=256, batch=256)
    for tp in (2, 4, 8):
        line = next(x for x in priced(job, f"tp={tp},pp=4").time if x.name == LineName.TP_COMM)
        assert line.hidden_seconds <= line.busy_seconds * (1 - 0.8 / tp)
        assert line.exposed_seconds >= line.busy_seconds * 0.8 / tp


def test_sends_hide_only_between_chunks(make_job):
    job = make_job("gpt3-175b", engine="megatron", gpus=256, batch=256)
    for text, hides in (("tp=8,pp=4", False), ("tp=8,pp=4,interleave=2", True)):
        line = next(x for x in priced(job, text).time if x.name == LineName.PP_COMM)
        assert (line.hidden_seconds == line.busy_seconds > 0) is hides
