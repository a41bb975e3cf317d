"""Layouts on mixed clusters, compared with uniform clusters and with sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.cost.chance import memory_limit_bytes
from planner.cost.estimate import estimate, timeline
from planner.cost.microbatch import num_microbatches
from planner.cost.prices import chunk_parts, layout_prices, stage_prices
from planner.cost.stage import stages_of
from planner.layout_text import parse_layout
from planner.search.space.rules import broken_rules
from planner.specs.calibration import UNCALIBRATED
from planner.specs.cluster import MixedClusterSpec
from planner.specs.job import join_pools
from planner.specs.load import load_job

LAYOUTS = (
    "tp=8,pp=4,dp=1,mbs=1,layers_per_stage=9/8/8/7",
    "tp=8,pp=4,dp=1,mbs=2,interleave=2,zero=1",
    "tp=2,pp=2,dp=8,zero=1,mbs=1,recompute=full/none",
)


@cache
def job(cluster="dgx-a100", nodes=2, model="llama3-8b", **options):
    return load_job(
        model=model,
        cluster=cluster,
        nodes=nodes,
        global_batch_size=64,
        sequence_length=2048,
        engine="megatron",
        **options,
    )


def mixed(*pools, between=None):
    """A job on pools, each given as a name and the job on it."""
    link = between or pools[0][1].cluster.links[-1]
    clusters = tuple(each.cluster.model_copy(update={"name": name}) for name, each in pools)
    jobs = tuple(
        replace(each, cluster=cluster, between=link) for cluster, (_, each) in zip(clusters, pools, strict=True)
    )
    return join_pools(MixedClusterSpec(name="mixed", pools=clusters, between=link), jobs)


def placed(text, pools):
    layout = parse_layout(text, num_layers=32, num_devices=32)
    return replace(layout, pools=tuple(pools))


@pytest.mark.parametrize("model", ["llama3-8b", "opt-6.7b"])  # the second one ties its embeddings
@pytest.mark.parametrize("text", LAYOUTS)
def test_pools_of_equal_hosts_are_priced_as_the_uniform_cluster_that_they_are(text, model):
    """Each stage fills whole hosts, so the same link joins neighbours within a pool and between pools."""
    whole, half = job(nodes=4, model=model), job(nodes=2, model=model)
    layout = parse_layout(text, num_layers=32, num_devices=32)
    pools = ("left",) * (layout.pp // 2) + ("right",) * (layout.pp // 2)
    expected = estimate(whole, layout)
    found = estimate(mixed(("left", half), ("right", half)), replace(layout, pools=pools))
    assert found.step_seconds == pytest.approx(expected.step_seconds, rel=1e-12)
    assert [stage.total_bytes for stage in found.memory] == [stage.total_bytes for stage in expected.memory]
    assert found.mfu == pytest.approx(expected.mfu, rel=1e-12)
    assert [line.bound for line in found.time] == [line.bound for line in expected.time]


def test_the_first_pool_supplies_what_is_not_of_one_pool():
    first, second = (replace(job(), headroom=share) for share in (0.1, 0.2))
    assert mixed(("first", first), ("second", second)).headroom == 0.1


def test_the_step_of_two_kinds_of_devices_by_hand():
    """Stage times equal those of uniform clusters; sends between the pools are summed from bytes, rate and latency."""
    jobs = job(nodes=2), job(cluster="dgx-h100", nodes=1)
    a100, h100 = (replace(each, calibration=UNCALIBRATED) for each in jobs)
    layout = placed("tp=4,pp=3,dp=2,mbs=2,layers_per_stage=8/8/16,recompute=none/none/none", ("a100", "a100", "h100"))
    found = mixed(("a100", a100), ("h100", h100))
    uniform = replace(layout, pools=())
    own = [stage_prices(each, uniform, stages_of(each, uniform)) for each in (a100, h100)]
    which = (0, 0, 1)
    seconds = np.array([own[pool].microbatch_seconds[stage] for stage, pool in enumerate(which)])
    exposed = [
        own[pool].pp_comm - own[pool].pp_hidden for pool in which
    ]  # the same on every stage of a uniform cluster
    num_bytes = 2 * 2048 * 4096 * 2 / 4  # sequence parallelism: a quarter of the activation each
    across = num_bytes / (25e9 * 0.88) + 14e-6 + a100.cluster.links[-1].startup
    sends = [float(each) for each in exposed]
    sends[1] = sends[1] / 2 + across  # to stage 0 inside the pool, to stage 2 across
    sends[2] = sends[2] / 2 + across
    seconds += np.array(sends) - np.array([float(each) for each in exposed])
    tail = max(float(own[pool].tail_seconds[stage]) for stage, pool in enumerate(which))
    m = 64 / (2 * 2)
    step = m * seconds.max() + seconds.sum() - seconds.max() + tail
    assert estimate(found, layout).step_seconds == pytest.approx(step, rel=1e-12)


def test_each_stage_has_the_limit_of_its_own_device():
    small, large = job(nodes=1), job(cluster="dgx-h200", nodes=1)
    layout = placed("tp=8,pp=2,dp=1", ("large", "small"))
    found = estimate(mixed(("small", small), ("large", large)), layout)
    assert [stage.limit_bytes for stage in found.memory] == [
        memory_limit_bytes(each, layout) for each in (large, small)
    ]
    between = sum(stage.total_bytes for stage in found.memory) / 2  # of the first stage's need and the second one's
    full = replace(small, headroom=1 - between / small.cluster.device.memory)
    tight = mixed(("small", full), ("large", large))
    assert estimate(tight, placed("tp=8,pp=2,dp=1", ("large", "small"))).fits
    assert not estimate(tight, placed("tp=8,pp=2,dp=1", ("small", "large"))).fits


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_executed_step_has_the_stages_of_the_ledger(text):
    found = mixed(("a100", job(nodes=2)), ("h100", job(cluster="dgx-h100", nodes=2)))
    layout = parse_layout(text, num_layers=32, num_devices=32)
    layout = replace(layout, pools=("h100",) * (layout.pp // 2) + ("a100",) * (layout.pp // 2))
    parts = sum(part.total for part in chunk_parts(found, layout).values())
    stages = [sum(parts[list(layout.chunks_of_stage(stage))]) for stage in range(layout.pp)]
    expected = np.broadcast_to(layout_prices(found, layout).microbatch_seconds, layout.pp)
    assert stages == pytest.approx(list(expected), rel=1e-9)
    m = float(num_microbatches(found, layout))
    assert timeline(found, layout).seconds >= m * max(stages) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("text", "pools", "why"),
    [
        ("tp=8,pp=2,dp=1", ("a100",), "has an entry for each of the 2 stages"),
        ("tp=8,pp=2,dp=1", ("a100", "v100"), "no pool v100; pools are a100, h100"),
        ("tp=8,pp=3,dp=1", ("a100", "h100", "a100"), "neighbours"),
        ("tp=8,pp=2,dp=1", ("h100", "h100"), "room for 1 stages of 8 devices"),
        ("tp=4,pp=2,dp=4", ("a100", "h100"), "room for 0 stages of 16 devices"),
    ],
)
def test_stages_need_a_pool_with_devices_for_them(text, pools, why):
    found = mixed(("a100", job(nodes=1)), ("h100", job(cluster="dgx-h100", nodes=1)))
    layout = replace(parse_layout(text, num_layers=32, num_devices=24), pools=pools)
    assert why in "; ".join(broken_rules(found, layout))


def test_a_host_with_a_dead_device_has_room_for_fewer_stages():
    whole, broken = job(nodes=7), job(gpus=7, nodes=None)
    found = mixed(("whole", whole), ("broken", broken))
    assert not broken_rules(found, placed("tp=8,pp=7,dp=1", ("whole",) * 7))
    assert "tp=8" in "; ".join(broken_rules(found, placed("tp=8,pp=8,dp=1", ("whole",) * 7 + ("broken",))))
    assert not broken_rules(found, placed("tp=1,pp=9,dp=7,mbs=1", ("whole",) * 8 + ("broken",)), except_for=("batch",))


def test_a_uniform_cluster_has_no_pools():
    assert "the cluster has no pools" in broken_rules(job(nodes=2), placed("tp=8,pp=2,dp=1", ("a", "b")))
