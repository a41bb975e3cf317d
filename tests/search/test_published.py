"""The model reproduces the lessons of Narayanan et al. (SC 2021) in the setting of their time.

Engine megatron-2021, ZeRO 0, full recompute, the batch of each figure. No fit uses any of the figures.
"""

from __future__ import annotations

import pytest
from published_runs import published_runs

from planner.answers.layout_remedies import layout_remedies
from planner.cost.estimate import estimate
from planner.errors import InputError
from planner.evidence.rows.jobs import job_of
from planner.layout_text import parse_layout
from planner.search.given import plan_for_text
from planner.search.search import NothingFits, search
from planner.search.space.constraints import Constraints
from planner.specs.load import load_job

ROWS = [run for run in published_runs() if run.source_set == "megatron-sc21-t1"]


def gpt(layers, hidden, heads, *, gpus, batch, across=False):
    return load_job(
        model="megatron-1t",
        cluster="dgx-a100",
        engine="megatron-2021",
        gpus=gpus,
        sequence_length=2048,
        global_batch_size=batch,
        precision="fp16",
        settings=(
            f"model.num_layers={layers}", f"model.hidden_size={hidden}", f"model.num_heads={heads}",
            f"model.num_kv_heads={heads}", f"model.head_size={hidden // heads}", f"model.ffn_hidden_size={4 * hidden}",
            "training.attention=unfused",
        ),
        allow_tp_across_nodes=across,
    )  # fmt: skip


def step(job, text):
    layers, devices = job.model.num_layers, job.cluster.num_devices
    layout = parse_layout(f"{text},recompute=full,sp=0", num_layers=layers, num_devices=devices)
    return estimate(job, layout).step_seconds


def test_there_are_ten_rows():
    assert len(ROWS) == 10


@pytest.mark.parametrize("run", ROWS, ids=lambda run: run.model)
def test_the_plan_is_at_least_as_fast_as_what_was_run(run):
    setup = job_of(run)
    found = search(setup.job, Constraints.parse(["zero=0,recompute=full"], []))
    assert not isinstance(found, NothingFits)
    assert found.step_seconds <= estimate(setup.job, setup.layout).step_seconds * (1 + 1e-12)


def test_tensor_parallelism_up_to_the_node_and_pipeline_across_nodes():
    """Figure 13: 161 billion parameters on 64 GPUs peak at tp = pp = 8, although tp may cross nodes."""
    for batch in (32, 128):
        job = gpt(32, 20480, 128, gpus=64, batch=batch, across=True)
        found = search(job, Constraints.parse(["zero=0,recompute=full,mbs=1,dp=1,interleave=1"], []))
        assert (found.layout.tp, found.layout.pp) == (8, 8)


@pytest.mark.parametrize("batch", [32, 128, 512])
def test_a_small_model_prefers_data_parallelism_to_a_pipeline(batch):
    """Figure 14: 5.9 billion parameters on 64 GPUs slow down with every doubling of the pipeline."""
    job = gpt(32, 3840, 32, gpus=64, batch=batch)
    seconds = [step(job, f"tp=1,pp={pp},mbs=1") for pp in (2, 4, 8, 16, 32)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("batch", [32, 128, 512])
def test_a_small_model_prefers_data_parallelism_to_tensor_parallelism(batch):
    """Figure 15: the same with every doubling of tensor parallelism."""
    job = gpt(32, 3840, 32, gpus=64, batch=batch)
    seconds = [step(job, f"tp={tp},pp=1,mbs=1") for tp in (2, 4, 8)]
    assert seconds == sorted(seconds)


def test_a_larger_batch_favours_deeper_pipelines():
    """Figure 11: eight times the layers on eight times the stages cost much more per layer at batch 8 than at 128."""
    slower = []
    for batch in (8, 32, 128):
        deep, flat = gpt(24, 20480, 128, gpus=64, batch=batch), gpt(3, 20480, 128, gpus=8, batch=batch)
        slower.append(step(deep, "tp=8,pp=8,mbs=1") / step(flat, "tp=8,pp=1,mbs=1"))
    assert slower == sorted(slower, reverse=True)
    assert slower[0] > 1.5
    assert slower[-1] < 1.15


def test_interleaving_wins_at_small_batch_and_its_gain_closes():
    """Figure 12: 175 billion parameters on 96 GPUs, batch 12 to 60."""
    gains = []
    for batch in (12, 24, 36, 48, 60):
        job = gpt(96, 12288, 96, gpus=96, batch=batch)
        gains.append(step(job, "tp=8,pp=12,mbs=1") / step(job, "tp=8,pp=12,mbs=1,interleave=2"))
    assert gains[0] > 1.1
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1 + (gains[0] - 1) / 2


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "gpus", "cut", "best"),
    [(4, 4096, 128, 32, "tp=8,pp=4", 4), (72, 10240, 80, 64, "tp=8,pp=8", 2)],
    ids=["1B", "91B"],
)
def test_the_best_microbatch_depends_on_the_model(layers, hidden, heads, gpus, cut, best):
    """Figures 8 and 16, batch 128: 4 for a billion parameters in four layers, 2 for 91 billion."""
    job = gpt(layers, hidden, heads, gpus=gpus, batch=128)
    assert min((1, 2, 4, 8, 16), key=lambda size: step(job, f"{cut},mbs={size}")) == best


def test_the_code_of_2021_is_planned_without_the_methods_of_2022():
    """Sequence parallelism and selective recompute are of Korthikanti et al. (2022), sections 4.2.2 and 5."""
    job = load_job(
        model="gpt3-175b", cluster="dgx-a100", engine="megatron-2021", gpus=128, sequence_length=2048,
        global_batch_size=128, precision="fp16",
    )  # fmt: skip
    found = search(job, Constraints.parse([], []))
    assert not isinstance(found, NothingFits)
    assert found.layout.tp > 1
    assert found.layout.sp == 0
    assert {*found.layout.recompute} <= {"none", "full"}
    with pytest.raises(InputError, match="engine megatron-2021 has no sequence parallelism"):
        search(job, Constraints.parse(["sp=1"], []))
    for text, words in (
        ("tp=8,pp=16,sp=1", "without sequence parallelism only; sp=0"),
        ("recompute=selective", "no selective recompute"),
    ):
        with pytest.raises(InputError, match=words):
            plan_for_text(job, text)
    left_open = plan_for_text(job, "tp=8,pp=16,recompute=full")
    assert left_open.layout.sp == 0
    assert all(each.layout.sp == 0 for each in layout_remedies(job, plan_for_text(job, "pp=32,recompute=full").layout))
