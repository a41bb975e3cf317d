"""Seconds of one collective on one group: latency and bandwidth of the links that the group spans.

Every function accepts numbers or arrays of groups and of bytes, which broadcast. `num_bytes` is the size of one rank's
vector: the whole vector of an all-reduce, the input of a reduce-scatter, the output of an all-gather.

A pass is one walk of the data through the group: a reduce-scatter and an all-gather are one pass each, an all-reduce is
two passes. A pass takes startup + steps * latency + bytes / bandwidth (Hockney, 1994). For messages under 1 MiB NCCL
uses low-latency protocols with a shorter startup, so the time here is too long by at most the startup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from planner.cost.groups import group, peer_bandwidth

if TYPE_CHECKING:
    from planner.cost.groups import Group, Level
    from planner.numbers import Number
    from planner.specs.cluster import ClusterSpec, LinkSpec

_TREE_SHARE: Final = 0.92
"""Share of the bandwidth that NCCL's tree algorithm is assumed to reach (src/graph/tuning.cc)."""


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
        each = num_bytes / peer_bandwidth(level.link)
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
        price = share * num_bytes / peer_bandwidth(level.link) + level.link.latency
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
        price = bytes_per_hop / peer_bandwidth(level.link) + level.link.latency
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
