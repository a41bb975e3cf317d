"""Seconds of one collective on one group: latency and bandwidth of the links that the group spans.

Every function accepts numbers or arrays of groups and of bytes, which broadcast. `num_bytes` is the size of one rank's
vector: the whole vector of an all-reduce, the input of a reduce-scatter, the output of an all-gather.

A pass is one walk of the data through the group: a reduce-scatter and an all-gather are one pass each, an all-reduce is
two passes. A pass takes startup + steps * latency + bytes / bandwidth (Hockney, 1994). For messages under 1 MiB NCCL
uses low-latency protocols with a shorter startup, so the time here is too long by at most the startup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.segments import domain_devices
from planner.once import once

if TYPE_CHECKING:
    from planner.numbers import Number
    from planner.specs.cluster import ClusterSpec, LinkSpec

_TREE_SHARE: Final = 0.92
"""Share of the bandwidth that NCCL's tree algorithm is assumed to reach (src/graph/tuning.cc)."""

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


def _peer_bandwidth(link: LinkSpec) -> float:
    """Bytes per second from one rank to another: over all its links to a switch, or over one link of a mesh."""
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

    Source: all-reduce over 2 to 64 hosts of one cluster, in the runs of the Ultra-Scale Playbook
    (tests/published/measurements.csv, hf-ultrascale): 46, 23, 14, 7.2, 3.8 and 1.9 GB/s with pipelines; 50, 33, 27, 28,
    29 and 26 without.
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


def reduce_scatter_seconds(where: Group, num_bytes: Number) -> Number:
    """Ring reduce-scatter of `num_bytes` per rank: n - 1 steps of 1/n of the bytes.

    Source: Patarasuk and Yuan (JPDC 2009); nccl-tests, bus bandwidth factor (n - 1) / n.
    """
    share = (where.size - 1) / where.size
    return share * where.seconds_per_byte * num_bytes + (where.ring_latency + where.startup)


def all_gather_seconds(where: Group, num_bytes: Number) -> Number:
    """Seconds of a ring all-gather after which each rank holds `num_bytes`; as long as a reduce-scatter.

    Source: Patarasuk and Yuan (JPDC 2009); nccl-tests, bus bandwidth factor (n - 1) / n.
    """
    return reduce_scatter_seconds(where, num_bytes)


def ring_all_reduce_seconds(where: Group, num_bytes: Number) -> Number:
    """Ring all-reduce: a reduce-scatter and an all-gather.

    Source: Patarasuk and Yuan (JPDC 2009): 2 (n - 1) / n of the bytes, 2 (n - 1) steps.
    """
    return 2.0 * reduce_scatter_seconds(where, num_bytes)


def _has_trees(level: Level) -> bool:
    """Whether this level joins hosts; inside a host NCCL uses chains instead of trees."""
    return level.link.kind in ("fat-tree", "ethernet")


def tree_all_reduce_seconds(where: Group, num_bytes: Number) -> Number:
    """Double binary tree all-reduce: all bytes pass through each rank, up the tree and down again.

    The tree joins hosts; a chain joins the ranks of each host.

    Source: Sanders et al. (2009); NCCL, src/graph/tuning.cc: 2 ((n / N - 1) a_host + log2 N a_network) of latency and
    at most 0.92 of the bandwidth.
    """
    hops = np.zeros(np.shape(where.size))
    for level in where.levels:
        joined = level.members / level.inside
        hops = hops + (np.ceil(np.log2(joined)) if _has_trees(level) else joined - 1.0) * level.link.latency
    return 2.0 * (where.seconds_per_byte * num_bytes / _TREE_SHARE + (hops + where.startup))


def halving_doubling_all_reduce_seconds(where: Group, num_bytes: Number) -> Number:
    """Recursive halving and doubling (butterfly), with the nearest partner first.

    Each step halves the bytes, so ranks exchange most bytes with near partners, inside one instance of the inner level.
    On the next level, each rank uses its own link.
    If n is not a power of two, the surplus ranks first send all bytes to a partner, and receive the result at the end.

    Source: Rabenseifner (2004); Thakur, Rabenseifner and Gropp (2005), section 4.4.
    """
    seconds = one_more = np.zeros(np.shape(where.size))
    for level in where.levels:
        each = num_bytes / _peer_bandwidth(level.link)
        before, after = np.floor(np.log2(level.inside)), np.floor(np.log2(level.members))
        seconds = seconds + (0.5**before - 0.5**after) * each + (after - before) * level.link.latency
        one_more = np.where(level.members > level.inside, each + level.link.latency, one_more)
    odd = np.bitwise_and(where.size, where.size - 1) > 0
    return 2.0 * (seconds + where.startup + np.where(odd, one_more, 0.0))


def hierarchical_all_reduce_seconds(where: Group, num_bytes: Number, *, num_pieces: int = 1) -> Number:
    """Reduce-scatter inside each instance, all-reduce of the shards between instances, all-gather inside.

    With many pieces the levels work at the same time, each on a different piece, and the slowest level sets the pace.

    Source: Cho et al., BlueConnect (SysML 2019), section 3; NCCL does this only in its trees and in the network.
    """
    latency = total = slowest = np.zeros(np.shape(where.size))
    for level in where.levels:
        seconds = (1.0 / level.inside - 1.0 / level.members) * num_bytes / level.bandwidth
        total, slowest = total + seconds, np.maximum(slowest, seconds)
        latency = latency + (level.members / level.inside - 1.0) * level.link.latency
    return 2.0 * (slowest + (total - slowest) / num_pieces + latency + where.startup)


def _sums(link: LinkSpec) -> bool:
    """Whether the switches of the link can sum data; a mesh has no switches."""
    return link.in_network is not None and link.kind in ("switch", "fat-tree")


def in_network_all_reduce_seconds(where: Group, num_bytes: Number) -> Number:
    """All-reduce summed by the switches: NVLS on an NVSwitch, SHARP on InfiniBand; inf if the link cannot sum.

    Each rank sends its bytes once and receives the sum once. On an NVSwitch each rank reads one part of the sum and
    multicasts it, which adds 1/n of the bytes. Lower levels that cannot sum use a ring for their shards.

    Source: Klenk et al. (ISCA 2020); Graham et al., SHARP (2016); NCCL, NVLS and CollNet algorithms.
    """
    seconds = np.where(np.equal(where.size, 1), 0.0, np.inf)
    below = np.zeros(np.shape(where.size))
    for level in where.levels:
        link, joined = level.link, level.members / level.inside
        summed = np.inf
        if _sums(link):
            sent = (1.0 + 1.0 / joined if link.kind == "switch" else 1.0) / level.inside * num_bytes
            summed = below + sent / (link.bandwidth * (link.in_network or 1.0)) + 2.0 * (link.latency + where.startup)
        seconds = np.where(level.members > level.inside, summed, seconds)
        volume = 1.0 / level.inside - 1.0 / level.members
        below = below + 2.0 * (volume * num_bytes / level.bandwidth + (joined - 1.0) * link.latency)
    return seconds


def parameter_server_seconds(where: Group, num_bytes: Number, num_servers: Number) -> Number:
    """The group's ranks push to `num_servers` servers on the outermost link and pull the sum back.

    A rank's link carries all bytes once in each direction; a server's link carries n / k times the bytes.

    Source: Li et al. (OSDI 2014); Jiang et al., BytePS (OSDI 2020), section 3.
    """
    one_way = np.zeros(np.shape(where.size))
    for level in where.levels:
        share = np.maximum(1.0, where.size / num_servers)
        price = share * num_bytes / _peer_bandwidth(level.link) + level.link.latency
        one_way = np.where(level.members > level.inside, price, one_way)
    return 2.0 * (one_way + where.startup)


def all_reduce_seconds(where: Group, num_bytes: Number) -> Number:
    """Seconds of the fastest algorithm that NCCL can choose: ring, tree or, if the link supports it, in-network.

    Source: NCCL, src/graph/tuning.cc.
    """
    seconds = ring_all_reduce_seconds(where, num_bytes)
    if any(map(_has_trees, where.levels)):  # inside a host a chain is never quicker than a ring
        seconds = np.minimum(seconds, tree_all_reduce_seconds(where, num_bytes))
    if any(_sums(level.link) for level in where.levels):
        seconds = np.minimum(seconds, in_network_all_reduce_seconds(where, num_bytes))
    return seconds


def all_reduce_algorithms(where: Group, num_bytes: Number) -> dict[str, Number]:
    """Seconds of every algorithm that a group could run, by name; inf for groups that cannot run it.

    Source: the functions above; the parameter server algorithm uses as many servers as ranks.
    """
    found = {
        "ring": ring_all_reduce_seconds(where, num_bytes),
        "tree": tree_all_reduce_seconds(where, num_bytes),
        "halving-doubling": halving_doubling_all_reduce_seconds(where, num_bytes),
        "hierarchical": hierarchical_all_reduce_seconds(where, num_bytes),
        "parameter-server": parameter_server_seconds(where, num_bytes, where.size),
    }
    if any(_sums(level.link) for level in where.levels):
        found["in-network"] = in_network_all_reduce_seconds(where, num_bytes)
    return found


def _reached(instances: Number, copies: int, groups: tuple[int, int] | None) -> Number:
    """Number of the `instances` that receive one of a token's `copies`, on average; see `all_to_all_seconds`."""
    if groups is None or copies == 1:
        return instances * (1.0 - (1.0 - 1.0 / instances) ** copies)
    num_groups, chosen = groups
    missed = 1.0  # probability that an instance, which holds `each` groups, holds none of the chosen groups
    each = np.maximum(1.0, num_groups / instances)
    for i in range(chosen):
        missed = missed * np.maximum(0.0, num_groups - each - i) / (num_groups - i)
    inside = np.maximum(1.0, instances / num_groups)  # instances over which one group is spread
    share = 1.0 - (1.0 - 1.0 / inside) ** (copies / chosen)
    return np.where(instances <= num_groups, instances * (1.0 - missed), chosen * inside * share)


def all_to_all_seconds(
    where: Group,
    num_bytes: Number,
    *,
    copies: int = 1,
    groups: tuple[int, int] | None = None,
    message_bytes: float = 0.0,
) -> Number:
    """Seconds of an all-to-all: every rank sends 1/n of its `num_bytes` to every rank, on all levels at once.

    All messages on one level share the rank's part of this level. Over N hosts, the share (N - 1) / N of the bytes
    passes through the rank's adapter.

    copies: number of random ranks that receive the same bytes. Each of the N instances of the level below receives at
        most one copy and distributes it inside, so the share N (1 - (1 - 1/N)^copies) / copies of the bytes is sent.
    groups: number of groups of consecutive ranks into which the ranks are divided, and number of these groups that
        receive the copies of one token. Each chosen group receives the same number of copies. If each instance holds
        one group, the copies reach as many instances as there are chosen groups.
    message_bytes: size of the messages, if the bytes travel as one message for each token and copy; on a link where the
        host's processor passes messages on, each of them takes at least the link's `message`.

    Source: NCCL, grouped sends and receives; derived here, checked by a count over real ranks. Copies: DeepSeek-V3
    (2024), section 3.2.2; expected number of distinct hosts.
    """
    seconds = np.zeros(np.shape(where.size))
    for level in where.levels:
        peers = level.members - level.inside
        instances = where.size / level.inside
        distinct = _reached(instances, copies, groups) / copies
        per_byte = 1.0 / level.bandwidth
        if message_bytes:
            per_byte = np.maximum(per_byte, level.link.message / message_bytes)
        level_seconds = distinct * peers / where.size * num_bytes * per_byte + level.link.latency
        seconds = np.maximum(seconds, (peers > 0) * level_seconds)
    return seconds + where.startup


def ring_exchange_seconds(where: Group, bytes_per_hop: Number) -> Number:
    """Every rank sends to its neighbour in the group's ring: one hop of ring attention.

    The most distant neighbours determine the time; each rank has its own link on each level.

    Source: Liu et al., Ring Attention (2023), section 3; alpha-beta model, Hockney (1994).
    """
    seconds = np.zeros(np.shape(where.size))
    for level in where.levels:
        price = bytes_per_hop / _peer_bandwidth(level.link) + level.link.latency
        seconds = np.where(level.members > level.inside, price, seconds)
    return seconds + where.startup


def send_seconds(
    cluster: ClusterSpec, stride: Number, num_bytes: Number, *, size: Number = 2, segment: Number = 0
) -> Number:
    """Seconds of a send from each rank of a chain of `size` ranks to the next, whose number is `stride` larger.

    The result is the time of the slowest hop.

    Source: alpha-beta model, Hockney (1994).
    """
    return ring_exchange_seconds(group(cluster, size, stride, segment=segment), num_bytes)
