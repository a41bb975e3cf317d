"""Data-parallel traffic of ZeRO and HSDP, compared with the ZeRO paper and with collectives put together by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.collectives import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from planner.cost.compute import PassSeconds
from planner.cost.groups import group
from planner.cost.memory import memory_lines
from planner.cost.prices import stage_prices
from planner.cost.stage import held_params, stages_of
from planner.cost.traffic import data_parallel_seconds
from planner.cost.transfers import state_transfers
from planner.layout_text import parse_layout
from planner.specs.calibration import UNCALIBRATED

QUIET = tuple(f"{link}.{delay}=0 us" for link in ("nvlink", "infiniband") for delay in ("latency", "startup"))


def job_and_prices(make_job, text, **options):
    job = make_job("llama3-8b", gpus=64, batch=64, engine="torch", precision="fp32", **options)
    job = replace(job, calibration=UNCALIBRATED)
    layout = parse_layout(text, num_layers=32, num_devices=64)
    return job, layout, stage_prices(job, layout, stages_of(job, layout))


def busy(prices):
    return float(np.sum(prices.dp.busy_once) + np.sum(prices.dp.busy_each))


def test_volumes_of_the_zero_paper(make_job):
    """2 psi with stages 0, 1 and 2, and 3 psi with stage 3, for one microbatch (ZeRO, section 7)."""
    zero, one, two, three = (
        busy(job_and_prices(make_job, f"dp=64,zero={z},mbs=1", settings=QUIET)[2]) for z in range(4)
    )
    assert one == pytest.approx(two, rel=1e-6)
    assert three == pytest.approx(1.5 * one, rel=1e-3)
    assert one == pytest.approx(zero, rel=0.02)  # an all-reduce may take another algorithm


@pytest.mark.parametrize("hsdp", [1, 2, 8])
def test_hsdp_gathers_inside_a_group_and_sums_shards_over_its_replicas(make_job, hsdp):
    job, layout, prices = job_and_prices(make_job, f"dp=64,zero=3,hsdp={hsdp},mbs=1")
    num_bytes = 4.0 * float(held_params(job, layout, stages_of(job, layout)).total[0]) / 32  # layer by layer
    shards = 64 // hsdp
    inside, replicas = group(job.cluster, shards, 1), group(job.cluster, hsdp, shards)
    by_hand = 32 * (
        2 * all_gather_seconds(inside, num_bytes)
        + reduce_scatter_seconds(inside, num_bytes)
        + all_reduce_seconds(replicas, num_bytes / shards)
    )
    assert busy(prices) == pytest.approx(float(by_hand))


def test_gradients_that_are_reduced_in_16_bits_are_half_as_long(make_job, with_engine):
    job = make_job("llama3-8b", engine="fsdp", gpus=8, batch=8)
    layout = parse_layout("dp=8,zero=2", num_layers=32, num_devices=8)
    num_bytes = {}
    for narrow in (False, True):
        own = with_engine(job, communication={"reduces_16_bit": narrow})
        found = state_transfers(own, layout, stages_of(own, layout))
        num_bytes[narrow] = next(each.num_bytes for each in found if each.kind == "reduce-scatter")
    held = float(held_params(job, layout, stages_of(job, layout)).total[0])
    assert num_bytes[True] * 32 == pytest.approx(2 * held)
    assert num_bytes[False] == pytest.approx(2 * num_bytes[True])


def test_hsdp_in_a_node_trades_memory_for_traffic(make_job):
    """This holds if the network between nodes is slow; eight cards of 25 GB/s would be as fast as the links inside."""
    (job, whole, far), (_, node, near) = (
        job_and_prices(make_job, f"dp=64,zero=3,hsdp={hsdp},mbs=1", settings=("infiniband.bandwidth=5 GB/s",))
        for hsdp in (1, 8)
    )
    assert busy(near) < 0.8 * busy(far)
    states = [
        sum(float(np.sum(line.num_bytes)) for line in memory_lines(job, layout, stages_of(job, layout))[:3])
        for layout in (whole, node)
    ]
    assert states[1] == pytest.approx(8 * states[0])


def nanotron_prices(make_job, zero):
    job = make_job("llama3-8b", gpus=64, batch=64, engine="nanotron", precision="bf16")
    job = replace(job, calibration=UNCALIBRATED)
    layout = parse_layout(f"tp=8,dp=8,zero={zero},mbs=8", num_layers=32, num_devices=64)
    return job, layout, stage_prices(job, layout, stages_of(job, layout))


def test_engines_that_sum_gradients_whole_gather_weights_too(make_job):
    """nanotron with ZeRO-1: an all-reduce of fp32 gradients, and after the update an all-gather of bf16 weights."""
    job, layout, prices = nanotron_prices(make_job, 1)
    held, where = float(held_params(job, layout, stages_of(job, layout)).total[0]), group(job.cluster, 8, 8)
    by_hand = all_reduce_seconds(where, 4.0 * held) + all_gather_seconds(where, 2.0 * held)
    assert busy(prices) == pytest.approx(float(by_hand))
    assert float(np.sum(prices.dp.exposed_once)) == busy(prices)  # it hides neither


@pytest.mark.parametrize(("zero", "calls"), [(0, 32 * 4 + 1), (1, 2)])
def test_checked_collectives_await_each_rank_of_their_group(make_job, with_engine, zero, calls):
    """With ZeRO-1 one sum and one gather; without ZeRO a bucket for each large matrix: 4 in a layer, and the ends."""
    job, layout, prices = job_and_prices(make_job, f"dp=64,zero={zero},mbs=1")
    checked = with_engine(job, communication={"rank_wait": 1.0})
    waited = busy(stage_prices(checked, layout, stages_of(checked, layout))) - busy(prices)
    assert waited == pytest.approx(64 * calls)


def test_what_hides_without_zero_need_not_with_it(make_job):
    _, _, prices = nanotron_prices(make_job, 0)
    assert float(np.sum(prices.dp.exposed_once)) < 0.5 * busy(prices)


def test_work_loses_time_beside_the_collectives_that_it_hides(make_job):
    """Beside C seconds of collectives, W seconds of work end after max(C, W + 0.3 C); the last layer's are bare."""
    job = replace(make_job("llama3-8b", gpus=8, batch=8, engine="torch"), calibration=UNCALIBRATED)
    layout = parse_layout("dp=8,zero=3,mbs=1", num_layers=32, num_devices=8)
    stage = stages_of(job, layout)

    def seconds(work):
        """Busy and exposed seconds of the forward pass after the first; 31 of 32 layers can hide something."""
        found = data_parallel_seconds(job, layout, stage, PassSeconds(forward=work * 32 / 31))
        return float(np.sum(found.busy_each)), float(np.sum(found.exposed.forward))

    busy_each, nothing_hidden = seconds(0.0)
    forward = nothing_hidden
    assert busy_each > forward > 0
    last, others = forward / 32, forward * 31 / 32
    for work in (0.25 * others, 0.7 * others, 2.0 * others, 100.0 * others):
        together = max(others, work + 0.3 * others)
        assert seconds(work)[1] == pytest.approx(last + together - work)
