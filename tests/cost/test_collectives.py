"""Collectives: identities, the geometry of groups compared with a count over real ranks, and a published table.

The algorithms are checked in test_collective_algorithms.py by walks through their steps.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_algorithms,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_all_reduce_seconds,
    ring_exchange_seconds,
    send_seconds,
    tree_all_reduce_seconds,
)
from planner.cost.groups import group, slowest_link
from planner.layout import Layout
from planner.specs.cluster_documents import load_cluster
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
    for name, nodes in (("dgx-a100", 8), ("gb200-nvl72", 36), ("dgx1-v100", 8), ("p4d", 8))
}
CLUSTER = {name: job.cluster for name, job in JOB.items()}
TABLE = Path(__file__).parents[3] / "shared" / "truth" / "allreduce_a100_nvlink.csv"
BYTES = st.floats(1e3, 1e10)
SIZES = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


def reached(link, members):
    """Bytes per second of one rank in a ring of `members` on a switch or a network."""
    peers = members - 1
    return link.bandwidth * link.efficiency * peers / (peers + link.half_peers)


@pytest.mark.skipif(not TABLE.exists(), reason="vTrain's table is not part of the project")
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_published_all_reduce_table(devices):
    with TABLE.open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["gpus"]) == devices]
    num_bytes = np.array([float(row["bytes"]) for row in rows])
    seconds = np.array([float(row["time_ns"]) for row in rows]) * 1e-9
    errors = np.abs(all_reduce_seconds(group(load_cluster("dgx-a100"), devices, 1), num_bytes) / seconds - 1)
    assert num_bytes.min() >= 2**20
    assert len(rows) == 64
    assert errors.mean() <= 0.02
    assert errors.max() <= 0.2


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
    assert seconds == pytest.approx(1e9 / reached(link, 2) + 2 * link.latency + 2 * link.startup)


def test_a_group_of_one_costs_nothing():
    where = group(CLUSTER["dgx-a100"], 1, 8)
    assert all_reduce_seconds(where, 1e9) == 0
    assert all_gather_seconds(where, 1e9) == 0


DEGREES = [(t, d, p) for t in (1, 2, 8) for d in (1, 3, 4, 8) for p in (1, 2, 3, 8) if t * d * p <= 64]


@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", ["dgx-a100", "gb200-nvl72"])
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
    inner, outer = cluster.links
    real = np.inf if size == 1 else reached(inner, fewest)
    if fewest < size:
        across = fewest * reached(outer, size // fewest)
        real = min(real, across) if fewest > 1 else across
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


@pytest.mark.parametrize("name", CLUSTER)
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 16, 24, 64])
def test_numbers_and_arrays_of_groups_agree(name, size, stride):
    sizes, strides = np.array([1, size, 64, size]), np.array([stride, stride, 1, 1])
    one, many = group(CLUSTER[name], size, stride), group(CLUSTER[name], sizes, strides)
    assert all_to_all_seconds(many, 1e8)[1] == pytest.approx(all_to_all_seconds(one, 1e8))
    assert ring_exchange_seconds(many, 1e8)[1] == pytest.approx(ring_exchange_seconds(one, 1e8))
    together = all_reduce_algorithms(many, 1e8)
    for algorithm, seconds in all_reduce_algorithms(one, 1e8).items():
        assert together[algorithm][1] == pytest.approx(seconds)
        assert together[algorithm][0] == 0
        assert seconds > 0 or size == 1


@pytest.mark.parametrize("size", [2, 4, 6, 12])
def test_hosts_of_six(size):
    cluster = CLUSTER["dgx-a100"]
    near = cluster.links[0].model_copy(update={"spans": "6 devices"})
    cluster = cluster.model_copy(update={"links": (near, cluster.links[1]), "devices_per_host": 6})
    runs = [range(start, start + size) for start in range(0, cluster.num_devices, size)]
    straddles = any(rank // 6 != run[0] // 6 for run in runs for rank in run)
    assert (slowest_link(cluster, size, 1) == "infiniband") == straddles
    assert slowest_link(cluster, 2, 3) == "nvlink"


def test_four_devices_of_a_rack_of_72_share_a_host_and_all_share_the_switch():
    cluster = CLUSTER["gb200-nvl72"]
    assert [slowest_link(cluster, size, 1) for size in (4, 8, 72, 144)] == ["nvlink"] * 3 + ["infiniband"]
    assert slowest_link(cluster, 64, 1) == "infiniband", "groups end to end: the second one straddles two racks"


@pytest.mark.parametrize(("size", "stride"), [(2, 8), (4, 4), (8, 2), (16, 1)])
def test_a_group_that_is_alone_has_the_whole_of_each_adapter_it_touches(size, stride):
    cluster, link = CLUSTER["p4d"], CLUSTER["p4d"].links[1]
    part = link.bandwidth * link.efficiency
    ranks = range(0, 8, stride)
    adapters = {rank // 2 for rank in ranks}
    assert group(cluster, size, stride).bandwidth == pytest.approx(len(ranks) * part)
    assert group(cluster, size, stride, alone=True).bandwidth == pytest.approx(len(adapters) * 2 * part)


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (64, 1), (8, 8), (16, 4)])
def test_all_to_all_takes_as_long_as_the_busiest_link_of_a_rank(size, stride):
    cluster, num_bytes = CLUSTER["dgx-a100"], 1e12  # so many that latency is nothing
    ranks = [position * stride for position in range(size)]
    peers = Counter(0 if rank // 8 == 0 else 1 for rank in ranks[1:])
    times = [
        count * num_bytes / size / reached(cluster.links[level], size // 8 if level and stride < 8 else size)
        for level, count in peers.items()
    ]
    assert all_to_all_seconds(group(cluster, size, stride), num_bytes) == pytest.approx(max(times), rel=1e-3)


def test_a_hop_of_a_ring_costs_one_adapter_however_many_ranks_a_host_has():
    cluster, link = CLUSTER["dgx-a100"], CLUSTER["dgx-a100"].links[1]
    hop = 1e9 / (link.bandwidth * link.efficiency) + link.latency + link.startup
    for size, stride in ((16, 1), (16, 4), (4, 8)):
        assert ring_exchange_seconds(group(cluster, size, stride), 1e9) == pytest.approx(hop)
    assert send_seconds(cluster, 8, 1e9) == pytest.approx(hop)
    assert send_seconds(cluster, 4, 1e9) < send_seconds(cluster, 4, 1e9, size=4) == pytest.approx(hop)


@pytest.mark.parametrize(("hosts", "choices"), [(2, 2), (2, 8), (4, 3), (8, 4)])
def test_copies_go_to_each_host_once(hosts, choices):
    """The bytes that leave a host, compared with a count over all ways to distribute the choices over hosts."""
    cluster, num_bytes = CLUSTER["dgx-a100"], 1e13  # so many that latency is nothing
    link = cluster.links[1]
    ways = list(itertools.product(range(hosts), repeat=choices))
    distinct = sum(len(set(way)) for way in ways) / len(ways)
    sent = distinct / choices * (hosts - 1) / hosts * num_bytes
    where = group(cluster, hosts * 8, 1)
    expected = sent / (link.bandwidth * link.efficiency)
    assert all_to_all_seconds(where, num_bytes, copies=choices) == pytest.approx(expected, rel=1e-3)
    assert all_to_all_seconds(where, num_bytes, copies=1) == pytest.approx(all_to_all_seconds(where, num_bytes))


@pytest.mark.parametrize("hosts", [2, 4, 8, 16])
def test_a_token_reaches_few_hosts_where_its_experts_are_of_few_groups(hosts):
    """8 choices in 4 of 8 groups of experts, 2 in each: the hosts of every choice of groups, counted one by one."""
    cluster, num_bytes = CLUSTER["dgx-a100"], 1e13  # so many that latency is nothing
    reached = []
    for chosen in itertools.combinations(range(8), 4):
        if hosts <= 8:
            reached.append(len({group * hosts // 8 for group in chosen}))
        else:  # each group lies on hosts / 8 hosts, two draws among them
            each = hosts // 8
            reached.append(4 * np.mean([len({a, b}) for a in range(each) for b in range(each)]))
    link = cluster.links[1]
    expected = np.mean(reached) / 8 * (1 - 1 / hosts) * num_bytes / (link.bandwidth * link.efficiency)
    where = group(cluster, 8 * hosts, 1)
    assert all_to_all_seconds(where, num_bytes, copies=8, groups=(8, 4)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("hosts", [2, 8, 16])
def test_where_each_choice_is_sent_alone_it_does_not_matter_whose_groups_they_are(hosts):
    where = group(CLUSTER["dgx-a100"], 8 * hosts, 1)
    assert all_to_all_seconds(where, 1e9, groups=(8, 4)) == pytest.approx(all_to_all_seconds(where, 1e9))


@pytest.mark.parametrize(
    ("piped", "measured"),
    [(True, {4: 22.8, 8: 13.7, 16: 7.2, 32: 3.8, 64: 1.9}), (False, {4: 32.9, 8: 27.4, 16: 27.9, 32: 28.7, 64: 26.4})],
)
def test_a_measured_network_gives_fewer_hosts_what_was_measured_over_fewer_hosts(piped, measured):
    """All-reduce over the hosts of one cluster, in GB/s of 50 for each GPU: medians of runs with and without pipelines.

    Only the figure over the most hosts is given; bandwidths over fewer hosts then follow within 30 %.
    """
    path = Path(__file__).parents[1] / "published" / "measurements.csv"
    found = {hosts: [] for hosts in measured}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (
                row["source_set"] == "hf-ultrascale"
                and (int(row["pp"]) > 1) is piped
                and int(row["gpus"]) // 8 in measured
            ):
                found[int(row["gpus"]) // 8].append(float(row["inter_gb_s_per_gpu"] or "nan"))
    assert {hosts: np.nanmedian(each) for hosts, each in found.items()} == pytest.approx(measured, rel=0.03)
    cluster = load_cluster("dgx-h100").model_copy(update={"hosts": 64})
    network, most = cluster.links[-1], max(measured)
    told = network.model_copy(update={"measured_bandwidth": measured[most] * 1e9, "measured_hosts": most})
    cluster = cluster.model_copy(update={"links": (cluster.links[0], told)})
    for hosts, gb_s in measured.items():
        assert float(group(cluster, hosts, 8).levels[-1].bandwidth) == pytest.approx(gb_s * 1e9, rel=0.3)
    assert float(group(cluster, most, 8).levels[-1].bandwidth) == measured[most] * 1e9
    assert float(group(cluster, 2, 8).levels[-1].bandwidth) == network.efficiency * network.bandwidth


@pytest.mark.parametrize(("size", "stride"), [(8, 1), (16, 1), (64, 1), (8, 4), (16, 4), (4, 8), (24, 1), (2, 1)])
def test_the_last_block_of_a_ring_has_come_over_all_links_but_the_nearest(size, stride):
    """Every block is walked around the ring, link by link; the slowest block determines the latency of the pass."""
    cluster = load_cluster("p5").model_copy(update={"hosts": 64})
    inner, outer = (link.latency for link in cluster.links)
    ranks = [number * stride for number in range(size)]
    links = [
        inner if ranks[i] // 8 == ranks[(i + 1) % size] // 8 else outer for i in range(size)
    ]  # from each rank to the next
    walks = [sum(links[(start + step) % size] for step in range(size - 1)) for start in range(size)]
    assert float(group(cluster, size, stride).ring_latency) == pytest.approx(max(walks))
