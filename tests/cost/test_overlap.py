"""Expert exchanges beside other microbatches, and CUDA graphs, compared with steps put together by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.activations import held_of_stage
from planner.cost.estimate import estimate, timeline
from planner.cost.layers import layer_seconds
from planner.cost.ledger import LineName
from planner.cost.stage import stages_of
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules
from planner.specs.calibration import UNCALIBRATED
from planner.specs.load import load_job


def mixtral(*settings, engine="megatron", batch=256):
    return load_job(
        model="mixtral-8x7b", cluster="dgx-h100", engine=engine, gpus=32, sequence_length=4096,
        global_batch_size=batch, settings=("model.vocab_size=1024", *settings),
    )  # fmt: skip


def line_of(job, layout, name):
    return next(line for line in estimate(job, layout).time if line.name == name)


@pytest.mark.parametrize(("text", "pairs"), [("ep=8", 8 - 1), ("pp=2,interleave=4,ep=8", 16 - 1 / 4)])
def test_pairs_of_passes_hide_exchanges_of_all_but_the_first_and_the_last(text, pairs):
    """m - 1 pairs without a pipeline; with v chunks per stage, a step is m - 1/v stages and one pass through all."""
    layout = parse_layout(f"{text},zero=1,mbs=1", num_layers=32, num_devices=32)
    alone, paired = mixtral(), mixtral("training.expert_overlap=true")
    exchanges = line_of(alone, layout, LineName.EP_COMM)
    # computing takes longer than the exchanges, so that these cost what they take of its processors, 20 of 132, and
    # what the host's order of launches leaves exposed: 0.65 of the rest hides
    assert line_of(alone, layout, LineName.COMPUTE).busy_seconds > exchanges.busy_seconds
    each = exchanges.busy_seconds / layout.num_microbatches(256)
    saved = estimate(alone, layout).pipeline_seconds - estimate(paired, layout).pipeline_seconds
    assert saved == pytest.approx(pairs * 0.65 * (1 - 20 / 132) * each)
    assert line_of(paired, layout, LineName.EP_COMM).busy_seconds == exchanges.busy_seconds


def test_pairs_hide_no_more_than_they_compute():
    """The network takes ten times as long as the products: one microbatch computes while the other waits."""
    layout = parse_layout("ep=8,zero=0,mbs=1", num_layers=32, num_devices=32)
    slow = ("nvlink.bandwidth=5 GB/s",)
    alone, paired = mixtral(*slow), mixtral(*slow, "training.expert_overlap=true")
    computing = line_of(alone, layout, LineName.COMPUTE).busy_seconds
    hidden = line_of(paired, layout, LineName.EP_COMM).hidden_seconds
    assert hidden == pytest.approx(0.65 * computing * 7 / 8)


def test_the_executed_schedule_hides_what_the_step_does():
    layout = parse_layout("pp=2,interleave=4,ep=8,zero=1,mbs=1", num_layers=32, num_devices=32)
    job = mixtral("training.expert_overlap=true")
    assert timeline(job, layout).seconds == pytest.approx(estimate(job, layout).pipeline_seconds, rel=0.02)


@pytest.mark.parametrize("text", ["ep=8", "pp=2,interleave=4,ep=8"])
def test_one_more_layer_is_held_while_passes_run_in_pairs(text):
    """Layers that are alive while a forward pass enters layers and a backward pass leaves others, last layers first."""
    layout = parse_layout(f"{text},zero=1,mbs=1", num_layers=32, num_devices=32)
    job = mixtral("training.expert_overlap=true")
    m, stage = layout.num_microbatches(256), stages_of(job, layout)
    (held, _), *_ = held_of_stage(job, layout, stage, m)
    of_chunk = 32 // layout.pp // layout.interleave
    for rank in range(layout.pp):
        warm_up = 2 * (layout.pp - rank - 1) + (layout.interleave - 1) * layout.pp + 1 if layout.pp > 1 else 1
        alive, fullest = warm_up * of_chunk, 0
        for _ in range(3):  # pairs of passes
            for _ in range(of_chunk):
                alive += 1  # a layer of the forward pass, while that of the backward pass is still there
                fullest, alive = max(fullest, alive), alive - 1
        assert np.broadcast_to(held, layout.pp)[rank] * 32 / layout.pp == pytest.approx(fullest)


@pytest.mark.parametrize(
    ("engine", "text", "setting", "words"),
    [
        ("megatron", "pp=2,ep=8", "expert_overlap=true", "interleaved stages or without a pipeline"),
        ("megatron", "ep=1", "expert_overlap=true", "no exchanges of experts"),
        ("megatron", "ep=8,recompute=full", "expert_overlap=true", "full recompute does not go with"),
        ("megatron", "ep=8,recompute=full", "cuda_graphs=layers", "full recompute does not go with"),
        ("megatron", "ep=8,offload=activations", "cuda_graphs=layers", "do not offload activations"),
        ("torch", "ep=8", "expert_overlap=true", "in line; --set training.expert_overlap=false, or --engine megatron"),
        ("torch", "ep=8", "cuda_graphs=step", "no CUDA graphs of step; --set training.cuda_graphs=none, or"),
    ],
)
def test_what_does_not_go_together_is_named(engine, text, setting, words):
    layout = parse_layout(f"{text},zero=1,mbs=1", num_layers=32, num_devices=32)
    (fault,) = broken_rules(mixtral(f"training.{setting}", engine=engine), layout)
    assert words in fault


def test_graphs_take_the_host_out_of_the_way():
    """The host takes 9 ms a layer; graphs of layers save all of it for dense layers, a part for layers with experts."""
    slow = "device.efficiency.layer_floor=9 ms"
    layout = parse_layout("mbs=1", num_layers=32, num_devices=1)

    def forward(*settings, experts):
        job = mixtral("model.hidden_size=512", "model.moe.ffn_hidden_size=512", *settings)
        job = replace(job, calibration=UNCALIBRATED)
        return float(layer_seconds(job, layout, experts=experts).passes.forward)

    free = "device.efficiency.layer_floor=0 ms"
    assert forward(slow, experts=False) == pytest.approx(9e-3)
    assert forward(slow, "training.cuda_graphs=layers", experts=False) == forward(free, experts=False)
    assert forward(slow, experts=True) == pytest.approx(6 * 9e-3)  # expert_host_factor of the profile
    assert forward(slow, "training.cuda_graphs=layers", experts=True) == pytest.approx(5 * 9e-3)
    assert forward(slow, "training.cuda_graphs=step", experts=True) == forward(free, experts=True)


@pytest.mark.parametrize(("cp", "taken"), [(8, 32 / 132), (16, 4 / 132)])
def test_a_hop_takes_processors_from_attention(cp, taken):
    """NCCL's channels: 32 in an NVLink domain of H100, 4 for an adapter of 50 GB/s; on a fast link the rest hides."""
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", engine="megatron", gpus=16, sequence_length=131072, global_batch_size=2,
        settings=tuple(f"{link}.latency=0 us" for link in ("nvlink", "infiniband")),
    )  # fmt: skip
    line = line_of(job, parse_layout(f"cp={cp},zero=1", num_layers=32, num_devices=16), LineName.CP_COMM)
    assert line.exposed_seconds == pytest.approx(taken * line.busy_seconds)


def test_every_hop_of_a_ring_launches_its_kernel_and_what_adds_it_up(with_engine):
    settings = ("device.efficiency.launch=1 s", "device.efficiency.layer_floor=0 ms")
    job = load_job(
        model="llama3-8b", cluster="dgx-h100", gpus=8, global_batch_size=8, engine="megatron", settings=settings
    )
    job = replace(job, calibration=UNCALIBRATED)
    layout = parse_layout("cp=4", num_layers=32, num_devices=8)
    ring, gathered = (
        layer_seconds(with_engine(job, communication={"context_exchange": each}), layout).core.forward
        for each in ("ring", "gather")
    )
    assert float(ring - gathered) == pytest.approx(3 * 2, rel=1e-3)


@pytest.mark.parametrize("count", [1, 2])
def test_no_more_is_held_than_all_microbatches_of_a_step(count):
    """A single microbatch has no other microbatch whose pass it could run beside."""
    layout = parse_layout("ep=8,zero=1,mbs=1", num_layers=32, num_devices=32)
    job = mixtral("training.expert_overlap=true", batch=32 * count)
    (held, _), *_ = held_of_stage(job, layout, stages_of(job, layout), count)
    assert float(np.max(held)) == pytest.approx(1 if count == 1 else 1 + 1 / 32)


def test_pairs_of_a_pipeline_hide_exchanges_and_sends_but_no_more_than_there_are():
    job = load_job(model="deepseek-v3", cluster="dgx-h100", engine="hai-llm", gpus=256, global_batch_size=2048)
    layout = parse_layout("pp=4,ep=64,schedule=dualpipev,zero=1,mbs=1", num_layers=61, num_devices=256)
    exchanges, sends = (line_of(job, layout, name) for name in (LineName.EP_COMM, LineName.PP_COMM))
    assert 0 < exchanges.hidden_seconds <= exchanges.busy_seconds
    assert 0 < sends.hidden_seconds <= sends.busy_seconds
    # both hide the same share of each pass: pairs know only the sum of the two
    shares = [each.hidden_seconds / each.busy_seconds for each in (exchanges, sends)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)


def test_an_engine_hides_its_share_of_what_pieces_could_hide(with_engine):
    job = load_job(model="llama3-70b", cluster="dgx-h100", engine="torchtitan", gpus=64, global_batch_size=64)
    layout = parse_layout("tp=8,dp=8,zero=3", num_layers=80, num_devices=64)
    hidden = []
    for share in (1.0, 0.4):
        priced = line_of(
            with_engine(job, overlap={"tensor_parallel": True, "tensor_parallel_share": share}),
            layout,
            LineName.TP_COMM,
        )
        hidden.append(priced.busy_seconds - priced.exposed_seconds)
    assert hidden[1] == pytest.approx(0.4 * hidden[0])
    assert hidden[0] > 0
