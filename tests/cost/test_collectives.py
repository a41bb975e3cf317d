"""Collectives: identities, and the geometry of groups against a count over real ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    group,
    reduce_scatter_seconds,
    ring_all_reduce_seconds,
    send_seconds,
    slowest_link,
    tree_all_reduce_seconds,
)
from planner.layout import Layout
from planner.specs.load import load_job

JOB = {
    name: load_job(
        model="gpt3-175b",
        cluster=name,
        training=None,
        engine="megatron",
        nodes=nodes,
        gpus=None,
        sequence_length=2048,
        global_batch_size=64,
        precision=None,
    )
    for name, nodes in (("dgx-a100", 8), ("gb200-nvl72", 36))
}
CLUSTER = {name: job.cluster for name, job in JOB.items()}
BYTES = st.floats(1e3, 1e10)
SIZES = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(list(CLUSTER)), SIZES, st.sampled_from([1, 2, 8]), BYTES)
def test_all_reduce_is_reduce_scatter_and_all_gather(name, size, stride, num_bytes):
    where = group(CLUSTER[name], size, stride)
    ring = ring_all_reduce_seconds(where, num_bytes)
    assert ring == pytest.approx(reduce_scatter_seconds(where, num_bytes) + all_gather_seconds(where, num_bytes))
    assert all_reduce_seconds(where, num_bytes) <= ring
    assert all_reduce_seconds(where, num_bytes) <= tree_all_reduce_seconds(where, num_bytes)


def test_a_ring_of_two_moves_the_payload_once_each_way():
    link = CLUSTER["dgx-a100"].links[0]
    seconds = ring_all_reduce_seconds(group(CLUSTER["dgx-a100"], 2, 1), 1e9)
    assert seconds == pytest.approx(1e9 / (link.bandwidth * link.efficiency) + 2 * link.latency)


def test_a_group_of_one_costs_nothing():
    where = group(CLUSTER["dgx-a100"], 1, 8)
    assert all_reduce_seconds(where, 1e9) == 0
    assert all_gather_seconds(where, 1e9) == 0


DEGREES = [(t, d, p) for t in (1, 2, 8) for d in (1, 3, 4, 8) for p in (1, 2, 3, 8) if t * d * p <= 64]


@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", CLUSTER)
def test_group_geometry_is_that_of_the_ranks(name, degrees, axis):
    cluster = CLUSTER[name]
    tp, dp, pp = degrees
    layout = Layout(tp=tp, dp=dp, pp=pp, recompute=("none",) * pp, layers_per_stage=(1,) * pp)
    domain = cluster.links[0].num_devices
    groups = {layout.group(axis, rank) for rank in range(layout.world_size)}
    size = len(next(iter(groups)))
    parts = [Counter(rank // domain for rank in ranks) for ranks in groups]
    fewest = min(min(part.values()) for part in parts)
    where = group(cluster, size, layout.stride(axis))
    link = slowest_link(cluster, size, layout.stride(axis))
    inner, outer = (each.bandwidth * each.efficiency for each in cluster.links)
    real = min(inner, fewest * outer) if fewest > 1 else outer
    real = (inner if size > 1 else np.inf) if fewest == size else real
    extent = size * layout.stride(axis)
    if domain % extent == 0 or extent % domain == 0:
        assert float(where.bandwidth) == pytest.approx(real)
        assert link == ("none" if size == 1 else cluster.links[0 if fewest == size else 1].name)
    else:  # some offset of a group may not occur among so few ranks
        assert float(where.bandwidth) <= real * (1 + 1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 64), st.sampled_from([1, 2, 3, 8]))
def test_a_ring_round_takes_one_hop_less_than_there_are_ranks(size, stride):
    cluster = CLUSTER["dgx-a100"]
    near, far = (link.latency for link in cluster.links)
    latency = float(group(cluster, size, stride).ring_latency)
    assert (size - 1) * near * (1 - 1e-9) <= latency <= (size - 1) * far * (1 + 1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SIZES, BYTES, st.floats(1.1, 10))
def test_more_bytes_and_slower_links_never_help(size, num_bytes, factor):
    cluster = CLUSTER["dgx-a100"]
    slow_links = tuple(link.model_copy(update={"bandwidth": link.bandwidth / factor}) for link in cluster.links)
    slow = cluster.model_copy(update={"links": slow_links})
    base = all_reduce_seconds(group(cluster, size, 1), num_bytes)
    assert all_reduce_seconds(group(cluster, size, 1), num_bytes * factor) >= base
    assert all_reduce_seconds(group(slow, size, 1), num_bytes) >= base
    assert send_seconds(slow, 8, num_bytes) > send_seconds(cluster, 8, num_bytes)


def test_a_send_inside_the_node_is_faster():
    cluster = CLUSTER["dgx-a100"]
    near, far = send_seconds(cluster, np.array([1, 8]), 1e8)
    assert near < far
