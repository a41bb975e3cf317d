"""The algorithms of all-reduce compared with a walk through their steps, and the wiring of meshes with a search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.cost.collectives import (
    all_gather_seconds,
    all_reduce_algorithms,
    all_reduce_seconds,
    all_to_all_seconds,
    halving_doubling_all_reduce_seconds,
    hierarchical_all_reduce_seconds,
    in_network_all_reduce_seconds,
    parameter_server_seconds,
    reduce_scatter_seconds,
    ring_all_reduce_seconds,
    ring_exchange_seconds,
    tree_all_reduce_seconds,
)
from planner.cost.groups import group
from planner.specs.cluster import LinkSpec
from planner.specs.cluster_documents import load_cluster

DGX = load_cluster("dgx-a100").model_copy(update={"hosts": 32})
H100 = load_cluster("dgx-h100").model_copy(update={"hosts": 32})
V100 = load_cluster("dgx1-v100")


def link(**values):
    """A link of 1 byte per second and 1 second per hop, so that costs equal counts."""
    base = {"name": "net", "spans": "cluster", "bandwidth": "1 B/s", "latency": "1 s", "kind": "fat-tree"}
    return LinkSpec.model_validate({**base, "efficiency": 1.0, **values})


def flat(**values):
    return DGX.model_copy(update={"links": (link(**values),)})


def run_ring(n):
    """Reduce and gather n parts around a ring, and check the sums; returns steps and parts that each rank sends."""
    parts = [[float(rank == part) + rank for part in range(n)] for rank in range(n)]
    want = [sum(column) for column in zip(*parts, strict=True)]
    steps = sent = 0
    for adds, first in ((True, 0), (False, 1)):
        for step in range(n - 1):
            moves = [((rank + first - step) % n, rank, (rank + 1) % n) for rank in range(n)]
            values = [parts[source][part] for part, source, _ in moves]
            for (part, _, target), value in zip(moves, values, strict=True):
                parts[target][part] = parts[target][part] + value if adds else value
            steps, sent = steps + 1, sent + 1
    assert all(row == want for row in parts)
    return steps, sent / n


def run_butterfly(n):
    """Recursive halving and doubling with the nearest partner first: its steps, and the bytes of the busiest rank."""
    power = 2 ** int(math.log2(n))
    held = {rank: set(range(power)) for rank in range(power)}
    steps, sent = (2, 2.0) if power < n else (0, 0.0)
    for bit in range(int(math.log2(power))):
        for rank in range(power):
            held[rank] = {part for part in held[rank] if (part ^ rank) >> bit & 1 == 0}
        steps, sent = steps + 2, sent + 2 * len(held[0]) / power
    assert all(parts == {rank} for rank, parts in held.items())
    return steps, sent


def tree_depth(n):
    """Depth of NCCL's binary tree: rank 0 is above a tree of the others, whose root is the highest power of two."""
    depths = []
    for rank in range(n):
        here, depth = rank, 0
        while here:
            low = here & -here
            up = (here ^ low) | (low << 1)
            here, depth = up if up < n else here ^ low, depth + 1
        depths.append(depth)
    return max(depths)


@pytest.mark.parametrize("n", range(1, 20))
def test_steps_and_bytes_are_those_of_a_walk_through_the_algorithm(n):
    where = group(flat(), n, 1)
    ring_steps, ring_sent = run_ring(n)
    assert ring_all_reduce_seconds(where, 1e3) == pytest.approx(ring_steps + 1e3 * ring_sent)
    steps, sent = run_butterfly(n)
    assert halving_doubling_all_reduce_seconds(where, 1e3) == pytest.approx(steps + 1e3 * sent)


@pytest.mark.parametrize("n", range(2, 40))
def test_a_tree_is_as_deep_as_the_one_that_nccl_builds(n):
    latency = tree_all_reduce_seconds(group(flat(), n, 1), 0.0)
    assert latency / 2 >= tree_depth(n)
    assert latency / 2 <= tree_depth(n) + 1
    if n & (n - 1) == 0:
        assert latency == 2 * tree_depth(n)


SIZES = st.sampled_from([2, 4, 8, 16, 32, 64, 256])
STRIDES = st.sampled_from([1, 2, 4, 8])
BYTES = st.floats(1e3, 1e10)
CLUSTERS = st.sampled_from([DGX, H100])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CLUSTERS, st.sampled_from([1, 2, 4]), st.sampled_from([16, 32, 64, 256]), BYTES)
def test_hierarchical_is_its_three_phases_and_in_pieces_never_slower_than_a_flat_ring(cluster, stride, size, num_bytes):
    where, inside = group(cluster, size, stride), 8 // stride
    near, far = group(cluster, inside, stride), group(cluster, size // inside, 8)
    phases = (
        reduce_scatter_seconds(near, num_bytes)
        + ring_all_reduce_seconds(far, num_bytes / inside)
        + all_gather_seconds(near, num_bytes)
    )
    startups = 2 * (near.startup + far.startup - where.startup)  # one launch, not three
    assert hierarchical_all_reduce_seconds(where, num_bytes) == pytest.approx(phases - startups)
    in_pieces = hierarchical_all_reduce_seconds(where, num_bytes, num_pieces=10**9)
    assert in_pieces <= ring_all_reduce_seconds(where, num_bytes) * (1 + 1e-6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CLUSTERS, SIZES, STRIDES, BYTES, st.floats(1.1, 10))
def test_every_algorithm_takes_longer_with_more_bytes_less_bandwidth_or_more_latency(
    cluster, size, stride, num_bytes, factor
):
    def slowed(**change):
        links = tuple(each.model_copy(update={k: f(getattr(each, k)) for k, f in change.items()}) for each in DGX.links)
        return all_reduce_algorithms(group(DGX.model_copy(update={"links": links}), size, stride), num_bytes)

    base = slowed()
    more = all_reduce_algorithms(group(DGX, size, stride), num_bytes * factor)
    narrow = slowed(bandwidth=lambda value: value / factor)
    late = slowed(latency=lambda value: value * factor)
    slow_start = slowed(startup=lambda value: value * factor)
    for name, seconds in base.items():
        assert min(more[name], narrow[name], late[name], slow_start[name]) > seconds
    assert all_reduce_seconds(group(cluster, size, stride), num_bytes) <= min(
        seconds
        for name, seconds in all_reduce_algorithms(group(cluster, size, stride), num_bytes).items()
        if name in ("ring", "tree", "in-network")
    )


def test_switches_that_sum_send_each_byte_once():
    n, num_bytes = 8, 1e9
    nvswitch = H100.links[0]
    seconds = in_network_all_reduce_seconds(group(H100, n, 1), num_bytes)
    bus = 2 * (n - 1) / n * num_bytes / seconds  # nccl-tests: bus bandwidth
    assert bus == pytest.approx(480e9, rel=0.02)
    assert all_reduce_seconds(group(H100, n, 1), num_bytes) == seconds
    assert np.isinf(in_network_all_reduce_seconds(group(H100, 16, 1), num_bytes)), "InfiniBand without SHARP"
    b200 = load_cluster("dgx-b200")
    assert 1.75 * 1e10 / in_network_all_reduce_seconds(group(b200, n, 1), 1e10) == pytest.approx(830e9, rel=0.02)
    mesh = nvswitch.model_copy(update={"kind": "mesh"})
    meshed = group(H100.model_copy(update={"links": (mesh, H100.links[1])}), n, 1)
    assert "in-network" not in all_reduce_algorithms(meshed, num_bytes)


def test_sharp_halves_what_the_network_carries():
    sharp = H100.links[1].model_copy(update={"in_network": H100.links[1].efficiency})
    summed = H100.model_copy(update={"links": (H100.links[0], sharp)})
    across = group(summed, 32, 8)
    ring = ring_all_reduce_seconds(across, 1e11)
    assert in_network_all_reduce_seconds(across, 1e11) == pytest.approx(ring * 32 / (2 * 31), rel=1e-3)
    assert all_reduce_seconds(group(summed, 256, 1), 1e9) <= all_reduce_seconds(group(H100, 256, 1), 1e9)


def test_sharp_above_links_that_do_not_sum_carries_the_shards_of_their_rings():
    """Two levels of rings (4 ranks in each of 4 switches) below a network that sums at half its bandwidth of 2 B/s."""
    board = link(name="board", spans="4 devices", bandwidth="8 B/s", kind="switch")
    rack = link(name="rack", spans="16 devices", bandwidth="4 B/s", latency="2 s", kind="switch")
    network = link(bandwidth="2 B/s", latency="3 s", startup="5 s", in_network=0.5)
    where = group(DGX.model_copy(update={"links": (board, rack, network), "devices_per_host": 4}), 64, 1)
    num_bytes = 16e3
    on_board = 3 * (1 + num_bytes / 4 / 8)  # steps of a ring of four, with a quarter of the bytes each
    in_rack = 3 * (2 + num_bytes / 4 / 4 / 4)
    up_and_down = num_bytes / 16 / (2 * 0.5) + 2 * (3 + 5)
    assert in_network_all_reduce_seconds(where, num_bytes) == pytest.approx(2 * (on_board + in_rack) + up_and_down)
    inner = group(DGX.model_copy(update={"links": (board, rack, network), "devices_per_host": 4}), 16, 1)
    assert np.isinf(in_network_all_reduce_seconds(inner, num_bytes))


def test_a_parameter_server_for_each_rank_moves_everything_twice_and_one_is_n_times_slower():
    where = group(flat(), 16, 1)
    assert parameter_server_seconds(where, 1e6, 16) == pytest.approx(2 * (1e6 + 1))
    assert parameter_server_seconds(where, 1e6, 64) == pytest.approx(2 * (1e6 + 1))
    assert parameter_server_seconds(where, 1e6, 1) == pytest.approx(2 * (16e6 + 1))


def test_what_has_no_bytes_takes_its_hops_and_the_start():
    """4 ranks, 1 s for each hop and 5 s to start: a ring has three hops, a tree two hops up, a peer one hop."""
    where = group(flat(startup="5 s"), 4, 1)
    assert reduce_scatter_seconds(where, 0.0) == 3 + 5
    assert ring_all_reduce_seconds(where, 0.0) == hierarchical_all_reduce_seconds(where, 0.0) == 2 * (3 + 5)
    assert tree_all_reduce_seconds(where, 0.0) == halving_doubling_all_reduce_seconds(where, 0.0) == 2 * (2 + 5)
    assert all_to_all_seconds(where, 0.0) == ring_exchange_seconds(where, 0.0) == 1 + 5
    assert parameter_server_seconds(where, 0.0, 4) == 2 * (1 + 5)


CUBE = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def links_of_rings(ranks):
    """Most links per rank and direction that rings through all `ranks` can use at once, by search."""
    if len(ranks) == 2:
        return CUBE.get((ranks[0], ranks[1]), 0)
    edges = {pair: count for pair, count in CUBE.items() if set(pair) <= set(ranks)}
    rings = []
    for rest in itertools.permutations(ranks[1:]):
        order = (ranks[0], *rest)
        ring = tuple(sorted(tuple(sorted(pair)) for pair in zip(order, (*rest, ranks[0]), strict=True)))
        if rest[0] < rest[-1] and all(pair in edges for pair in ring):
            rings.append(ring)

    def most(left, start):
        found = 0
        for index in range(start, len(rings)):
            if all(left[pair] > 0 for pair in rings[index]):
                used = {pair: count - rings[index].count(pair) for pair, count in left.items()}
                found = max(found, 1 + most(used, index))
                if found == 3:  # six links are three rings of both directions
                    break
        return found

    return 2 * most(edges, 0)  # links carry both directions at once


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_rings_in_the_hybrid_cube_mesh_get_the_links_that_a_search_finds(size, stride):
    starts = [base + offset for base in range(0, 8, size * stride) for offset in range(stride)]
    slowest = min(links_of_rings([start + i * stride for i in range(size)]) for start in starts)
    one = 25e9 * V100.links[0].efficiency
    assert group(V100, size, stride).bandwidth == pytest.approx(slowest * one)
    assert ring_exchange_seconds(group(V100, size, stride), 1e12) == pytest.approx(1e12 / one, rel=1e-3)


def test_every_device_of_the_cube_has_six_links():
    assert [sum(count for pair, count in CUBE.items() if device in pair) for device in range(8)] == [6] * 8


@pytest.mark.parametrize(("size", "links"), [(2, 1), (4, 3), (8, 7)])
def test_a_full_mesh_has_one_link_for_each_peer(size, links):
    mesh = link(spans="8 devices", bandwidth="448 GB/s", latency="1 us", kind="mesh", links_per_device=7)
    cluster = DGX.model_copy(update={"links": (mesh, DGX.links[1])})  # MI300X: 7 x 64 GB/s
    assert group(cluster, size, 1).bandwidth == pytest.approx(links * 64e9)
    assert ring_exchange_seconds(group(cluster, size, 1), 64e9) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    "values",
    [
        {"links_per_device": 7},
        {"kind": "mesh", "wiring": "hybrid-cube"},
        {"kind": "mesh", "wiring": "hybrid-cube", "links_per_device": 6, "spans": "16 devices"},
        {"kind": "ethernet", "in_network": 0.8},
        {"half_peers": -1.0},
        {"startup": "-1 us"},
        {"devices_per_adapter": 0},
    ],
)
def test_links_that_make_no_sense_are_refused(values):
    with pytest.raises(ValidationError):
        link(**values)
