"""Groups of ranks: the links that a group spans, and the bandwidth and latency of a ring on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.segments import domain_devices
from planner.once import once

if TYPE_CHECKING:
    from planner.numbers import Number
    from planner.specs.cluster import ClusterSpec, LinkSpec

_CUBE_RING_LINKS: Final = np.array([[0, 0, 0], [1, 1, 1], [4, 2, 1], [6, 1, 1]])
"""Links that a ring in a hybrid cube mesh can use at worst: 1, 2, 4, 8 ranks (rows) at stride 1, 2, 4 (columns).

Source: DGX-1 white paper, section 3.1, figure 4 (V100 wiring); the counts are found by search in
tests/cost/test_collectives.py.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network that at least one group crosses.

    inside: number of a group's ranks that share one instance of the level below.
    members: number of a group's ranks that share one instance of this level.
    bandwidth: bytes per second of one rank's own part of the link, in rings or when sending to all peers at once.
    """

    link: LinkSpec
    inside: Number
    members: Number
    bandwidth: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Properties of a group that determine the cost of its collectives; each field is a number or an array of groups.

    size: number of ranks.
    seconds_per_byte: time of each byte that one rank sends in a ring through the group; 0 for a group of one.
    ring_latency: seconds of the hops of one pass around the ring.
    startup: fixed seconds that each pass takes in addition to hops and bytes.
    levels: the levels that some of the groups cross, innermost first.
    """

    size: Number
    seconds_per_byte: Number
    ring_latency: Number
    startup: Number
    levels: tuple[Level, ...]

    @property
    def bandwidth(self) -> Number:
        """Bytes per second that one rank sends in a ring through the group; inf for a group of one."""
        with np.errstate(divide="ignore"):
            return 1.0 / np.asarray(self.seconds_per_byte, dtype=float)


def _members(cluster: ClusterSpec, size: Number, stride: Number, span: Number) -> Number:
    """Number of a group's ranks that share one instance of a level with `span` devices; for the group with the fewest.

    Groups follow one another, so a group of extent size * stride starts at a multiple of its extent. If neither extent
    nor span divides the other, at least one group crosses from one instance to the next. The smaller part of such a
    group has gcd(extent, span) / stride ranks. The slowest group determines the time, because all other groups wait for
    this group.

    Source: rank order of planner/layout.py.
    """
    extent = size * stride
    if not isinstance(span, int):
        members = np.minimum(size, np.maximum(1, np.gcd(extent, span) // stride))
        return np.where(np.greater_equal(span, cluster.num_devices), size, members)
    if span >= cluster.num_devices:
        return size
    # the low bit is the greatest common divisor with a power of two, in a tenth of the time of gcd
    common = np.minimum(extent & -extent, span) if span & (span - 1) == 0 else np.gcd(extent, span)
    return np.minimum(size, np.maximum(1, common // stride))


def peer_bandwidth(link: LinkSpec) -> float:
    """Bytes per second from one rank to another: over all its links to a switch, or over one link of a mesh.

    Source: derived here; tests/cost/test_collective_algorithms.py has a mesh and a switch.
    """
    return link.efficiency * link.bandwidth / (1.0 + link.half_peers) / (link.links_per_device or 1)


def _ring_links(link: LinkSpec, members: Number, stride: Number) -> Number:
    """Number of links that each rank of a mesh can use in rings through `members` ranks, `stride` apart.

    If every pair has a link, each of n ranks has n - 1 links inside the group, and rings use all of them.

    Source: Tillson (1980) for n - 1 disjoint directed rings of n (4 and 6 need direct exchange instead).
    """
    if link.wiring != "hybrid-cube":
        return np.clip(members - 1, 1, link.links_per_device)
    rank, far = (np.floor(np.log2(each)).astype(np.int64) for each in (members, stride))
    return np.maximum(1, _CUBE_RING_LINKS[np.minimum(rank, 3), np.minimum(far, 2)])


def _bandwidth(link: LinkSpec, joined: Number, members: Number, stride: Number) -> Number:
    """Bytes per second of one rank's share of a link, which joins `joined` instances of the level below.

    A group with few peers reaches less bandwidth: peers / (peers + half_peers) of the efficiency.

    Source: ramp fitted to vTrain's all-reduce table (2, 4 and 8 A100 reach 193, 218 and 227 GB/s of 300).
    """
    bandwidth = _spread_bandwidth(link, joined)
    if link.links_per_device is not None:
        bandwidth = bandwidth * (_ring_links(link, members, stride) / link.links_per_device)
    if link.half_peers > 0:
        peers = np.maximum(joined - 1.0, 1.0)
        bandwidth = bandwidth * (peers / (peers + link.half_peers))
    return bandwidth


def _spread_bandwidth(link: LinkSpec, hosts: Number) -> Number:
    """Bytes per second of one rank's part of a link in a group over `hosts` hosts.

    Over two hosts the bandwidth is the line rate times the efficiency of the link. With more hosts the bandwidth falls
    as 2 / hosts, but never below the bandwidth measured over `measured_hosts` hosts. With `measured_hosts` hosts or
    more, the measured bandwidth is used unchanged.

    Source: all-reduce over 2 to 64 hosts of one cluster, in the runs of the Ultra-Scale Playbook that did not wait for
    each rank (tests/published/measurements.csv, hf-ultrascale): 50, 33, 27, 28, 29 and 26 GB/s.
    """
    reached = link.bandwidth * link.efficiency
    if link.measured_bandwidth is None or link.measured_hosts is None:
        return reached
    fewer = np.maximum(reached * np.minimum(2.0 / np.asarray(hosts), 1.0), link.measured_bandwidth)
    return np.where(np.greater_equal(hosts, link.measured_hosts), link.measured_bandwidth, fewer)


@once
def _through_memory(cluster: ClusterSpec, link: LinkSpec) -> LinkSpec:
    """The link of cards that send through host memory; its bandwidth is what one card reaches while all cards send.

    A card writes its bytes through its root port into a buffer in host memory, from which the receiving card reads them
    through its own port. Each port carries both directions at once. If k cards share a port, each has 1/k of its
    bandwidth, which `bandwidth` already includes.

    Source: NCCL, src/graph/paths.cc (no peer access across host bridges) and src/transport/shm.cc; PCIe is full duplex.
    """
    if link.kind != "pcie" or cluster.host is None:
        return link
    share = cluster.host.memory_bandwidth / (2 * cluster.devices_per_host)
    return link.model_copy(update={"bandwidth": min(link.bandwidth, share)})


def _adapters(link: LinkSpec, inside: Number, size: Number, stride: Number) -> Number:
    """Bandwidth of `inside` ranks while no other group is active, in multiples of one rank's share.

    Derived here: `devices_per_adapter` neighbours share an adapter, and the group's ranks can use the whole adapter,
    including the shares of idle neighbours.
    """
    shared = link.devices_per_adapter
    if link.kind == "pcie":  # each card of the group sends by itself, and cards below one root port share the port
        return np.maximum(inside, shared / np.clip(shared // stride, 1, size))
    return np.maximum(shared, inside * np.minimum(stride, shared))


def group(cluster: ClusterSpec, size: Number, stride: Number, *, segment: Number = 0, alone: bool = False) -> Group:
    """The group of `size` ranks that are `stride` apart; the job uses `segment` hosts of each domain of the cluster.

    Inside one level a ring runs at the level's bandwidth. If q ranks share an instance of a level, they use q network
    cards together, so a ring between instances runs at q times a card's bandwidth. All groups of the same kind run at
    the same time, unless `alone` is set.

    Source: NCCL, graph search: one ring for each network card of the host; SimuMax shares cards the same way.
    """
    size, stride = np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
    inside = np.ones(np.broadcast(size, stride, segment).shape)  # ranks per instance of the levels crossed so far
    seconds_per_byte = ring_latency = startup = nearer = np.zeros(inside.shape)
    levels = []
    for number, each in enumerate(cluster.links):
        link = _through_memory(cluster, each)
        span = domain_devices(cluster, segment) if number == 0 else link.num_devices or cluster.num_devices
        members = np.maximum(inside, _members(cluster, size, stride, span))
        crosses = members > inside
        if crosses.any():
            bandwidth = _bandwidth(link, members / inside, members, stride)
            parts = _adapters(link, inside, size, stride) if alone else inside
            seconds_per_byte = np.maximum(seconds_per_byte, crosses / (parts * bandwidth))
            hops = size / inside - np.equal(inside, 1)
            ring_latency = ring_latency + crosses * hops * (link.latency - nearer)
            nearer = np.where(crosses, link.latency, nearer)
            startup = np.maximum(startup, crosses * link.startup)
            levels.append(Level(link=link, inside=inside, members=members, bandwidth=bandwidth))
            inside = members
        if (members == size).all():
            break
    return Group(
        size=size,
        seconds_per_byte=seconds_per_byte,
        ring_latency=ring_latency,
        startup=startup,
        levels=tuple(levels),
    )


def slowest_link(cluster: ClusterSpec, size: int, stride: int, *, segment: int = 0) -> str:
    """Name of the outermost link that a group crosses; `none` for a group of one.

    Source: rank order of planner/layout.py.
    """
    levels = group(cluster, size, stride, segment=segment).levels
    return levels[-1].link.name if levels else "none"
